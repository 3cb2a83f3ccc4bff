"""Metrics that are read from a service when they are asked for.

Invariant: what they read is read on the event loop that owns it, never from the thread that serves the metrics.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.loop_calls import call_on

TIMEOUT_S: Final = 5.0
"""Wall seconds to wait for the event loop; a scrape that takes longer is better lost."""


class LoopCollector(Collector):
    """Make it on the event loop that `read` is to run on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @abstractmethod
    def read(self) -> list[Metric]:
        """The metrics as they are now; called on the event loop."""

    def describe(self) -> list[Metric]:
        """Nothing: registering must not compute the metrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        if threading.get_ident() == self._thread:
            yield from self.read()
            return

        async def read() -> list[Metric]:
            return self.read()

        try:
            yield from call_on(self._loop, read, TIMEOUT_S)
        except (TimeoutError, RuntimeError):
            # The loop is stuck or closed: no metrics are better than a scrape that hangs.
            return
