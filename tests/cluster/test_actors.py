"""A process that joins a cluster at its first use, as the controller does: from a thread, with its loop running."""

from __future__ import annotations

import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

JOINER = """
import asyncio, os, signal, sys
from services.engine.cluster.actors import Cluster
from services.runtime.errors import TurnoutError

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    cluster = Cluster(sys.argv[1])
    print(await (await cluster.find("apart/answers")).call("ping"))
    try:
        await cluster.find("answers")
    except TurnoutError as error:
        print(error.reason)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop.wait(), 30)
    print("stopped")

asyncio.run(main())
"""


class Answers:
    def ping(self) -> str:
        return "pong"


def test_a_process_joins_late_and_keeps_its_own_signal_handlers(address: str) -> None:
    """Ray installs some that end a process at once."""
    options = {"name": "answers", "namespace": "apart", "num_cpus": 0, "lifetime": "detached"}
    actor = ray.remote(Answers).options(**options).remote()
    try:
        assert ray.get(actor.ping.remote()) == "pong"
        command = [sys.executable, "-c", JOINER, address]
        joined = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert joined.stdout.split() == ["pong", "ENGINE_UNREACHABLE", "stopped"], joined.stderr[-2000:]
    finally:
        ray.kill(actor)
