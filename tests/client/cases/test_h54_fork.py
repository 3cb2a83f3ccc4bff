"""H54: clients across a fork. Each parent is a process of its own: pytest's own threads are not to be forked."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.client.real import real_buffer

ROOT = Path(__file__).parents[3]

BEGIN = """
import asyncio, multiprocessing, os, sys, threading, time
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, BufferClient, ClientOptions, Forked, Timeouts, duration

TARGET = sys.argv[1]
OPTIONS = ClientOptions(timeouts=Timeouts(call=3.0, attempt=3.0))
WAIT = pb.WaitForSampleableRequest(run_id="r", partition="train", step=0, target=1, max_wait=duration(20))

def say(*words):
    # One write, so that lines of parent and child do not mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def call(client):
    began = time.monotonic()
    try:
        found = [run.run_id for run in client.calls.ListRuns(pb.ListRunsRequest()).runs]
    except Forked as error:
        found = ["Forked: " + str(error)]
    say("child", *found, "in time" if time.monotonic() - began < 3 else "late")

def finish(client):
    client.calls.AddGroups(pb.AddGroupsRequest(run_id="r", partition="train", step=0, groups=[{"group_id": "g"}]))
    output = pb.Output(segments=[pb.Segment(tokens=1)])
    result = pb.TrajectoryResult(group_id="g", outputs=[output])
    client.calls.FinishTrajectories(pb.FinishTrajectoriesRequest(run_id="r", partition="train", results=[result]))
"""

BLOCKING = """
client = BufferClient(TARGET, OPTIONS)
client.calls.CreateRun(pb.CreateRunRequest(run_id="r"))
waiting = threading.Thread(target=lambda: say("parent", client.wait_for_sampleable(WAIT).outcome))
waiting.start()
time.sleep(0.3)
"""

FORK = """
child = os.fork()
if child == 0:
    call(client)
    # With all of the interpreter's clean-up: what that closes must not be the parent's.
    sys.exit(0)
_, status = os.waitpid(child, 0)
if status:
    say("the child ended with", status)
finish(client)
waiting.join()
"""

POOL = """
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.starmap(call_inherited, [()] * 4)
finish(client)
waiting.join()
"""

ASYNC = """
async def in_child(client):
    began = time.monotonic()
    try:
        found = [run.run_id for run in (await client.calls.ListRuns(pb.ListRunsRequest())).runs]
    except Forked as error:
        found = ["Forked: " + str(error)]
    say("child", *found, "in time" if time.monotonic() - began < 3 else "late")

def fork(*children):
    child = os.fork()
    if child == 0:
        for run in children:
            run()
        os._exit(0)
    os.waitpid(child, 0)
"""


async def output(script: str, **environment: str) -> list[str]:
    """The lines that a script prints; it gets the address of a buffer."""
    async with real_buffer() as host:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            BEGIN + script,
            host.target,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            said, errors = await asyncio.wait_for(process.communicate(), 40)
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
            raise
    assert process.returncode == 0, errors.decode()
    assert "Traceback" not in errors.decode(), errors.decode()
    return sorted(said.decode().splitlines())


SUPPORT = {"GRPC_ENABLE_FORK_SUPPORT": "1"}


async def test_h54_a_child_works_and_the_parent_s_wait_goes_on() -> None:
    """A channel opened before the fork hung in the child, ignoring its time-outs."""
    assert await output(BLOCKING + FORK, **SUPPORT) == ["child r in time", "parent 1"]


async def test_h54_a_data_loader_s_pool_of_workers_works() -> None:
    """Workers of a data loader inherit the client by a global, several of them at once."""
    script = "def call_inherited():\n    call(client)\n" + BLOCKING + POOL
    assert await output(script, **SUPPORT) == [*["child r in time"] * 4, "parent 1"]


async def test_h54_between_calls_a_child_works_without_a_word_in_the_environment() -> None:
    """Most loops fork their data loader when nothing is at work; the parent's channel must not be shared with it."""
    script = (
        BLOCKING[: BLOCKING.index("waiting")] + "\nwaiting = threading.Thread(target=lambda: None)\nwaiting.start()\n"
    )
    assert await output(script + FORK + "call(client)\n") == ["child r in time"] * 2


@pytest.mark.parametrize(("value", "word"), [("", "at work"), ("0", "GRPC_ENABLE_FORK_SUPPORT is 0")])
async def test_h54_where_grpc_would_hang_or_crash_the_child_is_told_at_once(value: str, word: str) -> None:
    """It hangs with the support off and crashes now and then without it, whatever the deadline."""
    child, parent = await output(BLOCKING + FORK, GRPC_ENABLE_FORK_SUPPORT=value)
    assert child.startswith("child Forked: ")
    assert word in child
    assert child.endswith("in time")
    assert parent == "parent 1"


async def test_h54_after_an_asyncio_client_was_open_only_blocking_ones_go_on() -> None:
    """The thread that polls for asyncio stays behind: calls of the child would hang, its own new clients' too.

    Without a fork: grpcio itself crashes now and then in a child of a process with an open asyncio channel.
    """
    script = ASYNC + (
        "from turnout.client import _fork\n"
        "async def main():\n"
        "    client = AsyncBufferClient(TARGET, OPTIONS)\n"
        "    await client.calls.CreateRun(pb.CreateRunRequest(run_id='r'))\n"
        "    _fork._in_child()\n"
        "    await in_child(client)\n"
        "    await in_child(AsyncBufferClient(TARGET, OPTIONS))\n"
        "    with BufferClient(TARGET, OPTIONS) as other:\n"
        "        await asyncio.to_thread(call, other)\n"
        "asyncio.run(main())\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"
    )
    first, second, blocking = await output(script, **SUPPORT)
    assert first == second
    assert first.startswith("child Forked: ")
    assert "asyncio" in first
    assert first.endswith("in time")
    assert blocking == "child r in time"


async def test_h54_a_client_that_was_never_used_works_in_the_child() -> None:
    """Making a client opens nothing, so a fork before its first call is harmless."""
    script = (
        ASYNC + "fork(lambda: asyncio.run(in_child(AsyncBufferClient(TARGET, OPTIONS))),"
        " lambda: call(BufferClient(TARGET, OPTIONS)))\n"
    )
    assert await output(script, **SUPPORT) == ["child in time", "child in time"]
