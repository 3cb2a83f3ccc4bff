"""A small Ray cluster on this machine, and producer processes in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

STARTS = 4
"""Times that a cluster is tried to start."""


@contextlib.contextmanager
def cluster(num_cpus: int) -> Iterator[str]:
    """Start a cluster that listens on loopback alone, join it, and end it with everything in it; yields its address."""
    import ray

    # Ray's logs and sockets; the names of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        try:
            yield _start(ray, directory, num_cpus)
        finally:
            ray.shutdown()


def _start(ray: Any, directory: str, num_cpus: int) -> str:
    attempt = 0
    while True:
        attempt += 1
        try:
            context = ray.init(
                _temp_dir=f"{directory}/{attempt}",
                num_cpus=num_cpus,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=400 << 20,
                logging_level="ERROR",
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
            return str(context.address_info["address"])
        except Exception as error:
            ray.shutdown()
            # Ray gives its node 30 seconds, whatever else the machine has to do.
            if attempt == STARTS or "timed out during startup" not in str(error):
                raise


def killed_producer(address: str, store: str, target: str, *group_ids: str) -> None:
    """Let a process finish groups, and kill it."""
    command = [sys.executable, "-m", "tests.client.stores.producer", store, target, *group_ids]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "RAY_ADDRESS": address}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "finished\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
