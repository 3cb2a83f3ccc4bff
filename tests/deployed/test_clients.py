"""H53 and H54: clients of a deployed buffer in several event loops, threads and across fork, over TLS with tokens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.runtime.permissions import Role
from tests.client.cases.test_h54_fork import BEGIN, BLOCKING, FORK, POOL, SUPPORT
from tests.deployed.manifests import ROOT
from tests.deployed.site import Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOPS = """
import asyncio, gc, os, sys, threading
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, BufferClient

TARGET, CALLS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
REQUEST = pb.ListRunsRequest()
made = {"async": 0, "blocking": 0}
lock = threading.Lock()

def count(kind):
    with lock:
        made[kind] += 1

def asynchronously(calls):
    async def main():
        async with AsyncBufferClient(TARGET) as client:
            for _ in range(calls):
                await client.calls.ListRuns(REQUEST)
                count("async")
    asyncio.run(main())

def blocking(calls):
    with BufferClient(TARGET) as client:
        for _ in range(calls):
            client.calls.ListRuns(REQUEST)
            count("blocking")

threads = [threading.Thread(target=work, args=(CALLS,)) for work in (asynchronously, asynchronously, blocking)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
asynchronously(1)
asynchronously(1)
gc.collect()
before = len(os.listdir("/proc/self/fd")), threading.active_count()
for _ in range(ROUNDS):
    asynchronously(1)
    blocking(1)
for _ in range(100):
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    if after[0] <= before[0] + 4:
        break
    threading.Event().wait(0.05)
print(made["async"], made["blocking"], after[0] - before[0] <= 4, after[1] - before[1] <= 32)
"""


@pytest.fixture(scope="module")
def target(ground: Site) -> str:
    return ground.start("buffer").members["buffer"].target


def run(ground: Site, script: str, *arguments: str, **variables: str) -> list[str]:
    """The lines that a script prints; it must leave stderr quiet."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **ground.environment(Role.OPERATOR), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for noise in ("Traceback", "BlockingIOError", "never awaited"):
        assert noise not in done.stderr, done.stderr
    return sorted(done.stdout.splitlines())


def test_h53_two_loops_a_blocking_client_and_two_hundred_more(ground: Site, target: str) -> None:
    """2 000 calls in each of two loops and a thread at once, then 200 clients of both kinds opened and closed, then
    asyncio.run() twice: every call answers, descriptors and threads come back.
    """
    assert run(ground, LOOPS, target, "2000", "200") == [f"{2 * 2000 + 2 + 200} {2000 + 200} True True"]


def test_h54_a_child_works_and_the_parents_wait_goes_on(ground: Site, target: str) -> None:
    """A fork while a wait is parked, with TLS in both directions. A call has nine seconds, thrice the case."""
    begin = BEGIN.replace('run_id="r"', 'run_id="forked"').replace("Timeouts(call=3.0", "Timeouts(call=9.0")
    begin = begin.replace("attempt=3.0", "attempt=9.0").replace("began < 3", "began < 9")
    script = begin + BLOCKING.replace('run_id="r"', 'run_id="forked"') + FORK
    assert run(ground, script, target, **SUPPORT) == ["child forked in time", "parent 1"]


def test_h54_a_data_loaders_pool_of_workers_works(ground: Site, target: str) -> None:
    """Workers of a data loader inherit the client, several of them at once."""
    begin = BEGIN.replace('run_id="r"', 'run_id="pooled"').replace("Timeouts(call=3.0", "Timeouts(call=9.0")
    begin = begin.replace("attempt=3.0", "attempt=9.0").replace("began < 3", "began < 9")
    inherited = "def call_inherited():\n    call(client)\n"
    script = begin + inherited + BLOCKING.replace('run_id="r"', 'run_id="pooled"') + POOL
    told = run(ground, script, target, **SUPPORT)
    assert told[-1] == "parent 1"
    assert all(line.startswith("child ") and line.endswith("in time") for line in told[:-1])
    assert len(told) == 5


def test_h54_importing_the_client_opens_nothing(ground: Site) -> None:
    """A channel that an import opens is one that every fork inherits."""
    script = (
        "import os, threading\n"
        "before = len(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "import turnout.client, turnout.trainer, turnout.worker\n"
        "print(before == (len(os.listdir('/proc/self/fd')), threading.active_count()))\n"
    )
    assert run(ground, script) == ["True"]
