"""A Ray cluster of several nodes on this machine: a raylet for each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

OBJECT_STORE_BYTES: Final = 100 << 20
"""Near the least that Ray takes."""

COMES_UP_WITHIN_S: Final = 15.0
"""Beyond Ray's own time: it gives a raylet 30 s, which is too little where everything else has much to do."""

TRIES: Final = 10
"""A raylet ends itself when its helpers need more than 15 s to start, as they do at twenty times what two cores can
carry."""


class Raylets:
    """The nodes of a running cluster; this process is a driver on the head."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self._cluster.address)

    def add(self, name: str, resource: str) -> None:
        """Add a node that offers one unit of a resource; `name` is for `kill`."""
        for left in reversed(range(TRIES)):
            try:
                self._nodes[name] = self._cluster.add_node(
                    num_cpus=0,
                    num_gpus=0,
                    resources={resource: 1},
                    object_store_memory=OBJECT_STORE_BYTES,
                )
            except Exception as error:
                # Ray has no type of its own for it.
                if "timed out during startup" not in str(error) or not left:
                    raise
            else:
                return

    def node_id(self, name: str) -> str:
        """Ray's id of a node."""
        return str(self._nodes[name].node_id)

    def kill(self, name: str) -> None:
        """End a node without a word, with everything on it."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)


@contextmanager
def raylets(**nodes: str) -> Iterator[Raylets]:
    """Start a head and nodes, given as NAME=RESOURCE, join as a driver, and end all of it.

    The head offers `head`. All nodes have the address of this machine.
    """
    import ray
    from ray.cluster_utils import Cluster

    # Ray's logs and sockets; the names of sockets must be short.
    directory = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        # As docs/ray.md advises: services that wait for everything else to have had its turn are slow to come back.
        patch.setenv("RAY_worker_niceness", "0")
        patch.setattr("ray._private.services.get_node", _patient(ray._private.services.get_node))
        # Nodes are added from threads, too, where the signal handlers of a shutdown at exit cannot be set.
        cluster = Cluster(shutdown_at_exit=False)
        try:
            cluster.add_node(
                num_cpus=0,
                num_gpus=0,
                resources={"head": 1},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
            patch.setenv("RAY_ADDRESS", str(cluster.address))
            made = Raylets(cluster)
            for name, resource in nodes.items():
                made.add(name, resource)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()
            cluster.shutdown()
            # Of a node that did not come up in time, Ray forgets what it had started.
            _kill_all_of(directory)
            shutil.rmtree(directory, ignore_errors=True)


def _patient(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Ray's look for a node that it started, which may take longer than Ray wants to wait."""

    def patient(address: str, node_id: str) -> Any:
        ends = time.monotonic() + COMES_UP_WITHIN_S
        while True:
            try:
                return get_node(address, node_id)
            except RuntimeError:
                if time.monotonic() >= ends:
                    raise
            time.sleep(0.2)

    return patient


def _kill_all_of(directory: str) -> None:
    """Kill every process whose command line names this directory, which is the cluster's own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if directory.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
