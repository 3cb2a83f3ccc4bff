"""A service as a process: signals, exit codes and the lines that scripts read."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from services.runtime.statuses import from_rpc_error
from tests.runtime.helpers import Caller

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.runtime.service_process",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().rstrip("\n")


async def _target(process: asyncio.subprocess.Process) -> str:
    line = await _line(process)
    assert line.startswith("turnout probe listening on "), line
    return line.removeprefix("turnout probe listening on ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_h50_a_signal_stops_in_order(number: signal.Signals) -> None:
    """Left to its default, SIGTERM cuts every call and runs no clean-up."""
    async with _process("127.0.0.1:0") as process:
        target = await _target(process)
        async with grpc.aio.insecure_channel(target) as channel:
            wait = Caller(channel).stream("x", timeout=None)
            assert (await wait.read()).value == "here"
            process.send_signal(number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wait.read()
            assert from_rpc_error(caught.value).reason == "DRAINING"
        # The grace is a minute: only a stop that waits for nothing passes within the test's limit.
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert process.stderr is not None
        assert "Traceback" not in (await process.stderr.read()).decode()


async def test_h50_a_second_signal_ends_at_once() -> None:
    """A drain that hangs must not leave SIGKILL as the only way out."""
    async with _process("127.0.0.1:0", "hang-at-drain") as process:
        await _target(process)
        process.send_signal(signal.SIGTERM)
        assert await _line(process) == "hanging"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 128 + signal.SIGTERM


async def test_h50_a_signal_during_start_ends_it() -> None:
    """A restore may take minutes; who stops the service then does not want to wait for it."""
    async with _process("127.0.0.1:0", "hang-at-start") as process:
        assert await _line(process) == "hanging"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_h47_a_second_process_on_the_port_exits_with_one_line() -> None:
    """Two services that share a port each see half of the calls, with no error anywhere."""
    async with _process("127.0.0.1:0") as process:
        target = await _target(process)
        async with _process(target) as second:
            output, errors = await asyncio.wait_for(second.communicate(), 30)
            assert second.returncode == 1
            assert output == b""
            assert errors.decode() == f"turnout probe: cannot listen on {target}: address in use\n"


async def test_h47_a_socket_left_by_sigkill_is_taken_over(tmp_path: Path) -> None:
    """After a crash the service must start again without a hand; beside a live one it must not start."""
    path = f"unix:{tmp_path}/probe.sock"
    async with _process(path) as process:
        assert await _target(process) == path
        async with _process(path) as second:
            _, errors = await asyncio.wait_for(second.communicate(), 30)
            assert second.returncode == 1
            assert b"address in use" in errors
        process.kill()
        await process.wait()
    assert (tmp_path / "probe.sock").exists()
    async with _process(path) as process:
        target = await _target(process)
        async with grpc.aio.insecure_channel(target) as channel:
            assert (await Caller(channel).unary("x")).value == "x"
