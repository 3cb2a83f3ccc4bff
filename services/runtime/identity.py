"""What a service is and whether it can be used, as metrics."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import google.protobuf
import grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@cache
def own_version() -> str:
    """The version of Turnout's services that is installed; `unknown` if they run from a bare folder."""
    try:
        return version("turnout-services")
    except PackageNotFoundError:
        return "unknown"


class Identity(Collector):
    """Versions, health and clock. `serving` may be asked from any thread."""

    def __init__(self, service: str, serving: Callable[[], bool]) -> None:
        self._service = service
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        versions = {
            "service": self._service,
            "version": own_version(),
            "python": platform.python_version(),
            "grpc": grpc.__version__,
            "protobuf": google.protobuf.__version__,
        }
        build = GaugeMetricFamily("turnout_build_info", "1, with what this service is made of.", labels=list(versions))
        build.add_metric(list(versions.values()), 1)
        yield build
        yield GaugeMetricFamily("turnout_serving", "1 while the service can be used.", self._serving())
        yield GaugeMetricFamily("turnout_clock_seconds", "Unix time of the service's clock.", time.time())
