"""A small Ray cluster on this machine, and producer processes in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def cluster(num_cpus: int) -> Iterator[str]:
    """Start a cluster that listens on loopback alone, join it, and end it with everything in it; yields its address."""
    import ray

    # Ray's logs and sockets; the names of sockets must be short.
    directory = tempfile.mkdtemp(prefix="ray-")
    context: Any = ray.init(
        _temp_dir=directory,
        num_cpus=num_cpus,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=400 << 20,
        logging_level="ERROR",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


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
