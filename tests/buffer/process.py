"""A buffer in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from tests.buffer.helpers import RUN, Caller

ROOT = Path(__file__).parents[2]
# Longer than a start on a busy machine takes.
START_S = 30.0


class BufferProcess:
    """One life of a buffer; `target` is where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, target: str, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.target = target
        self.channel = channel

    def caller(self, run_id: str = RUN, partition: str = "train") -> Caller:
        return Caller(self.channel, run_id, partition)

    async def kill(self) -> None:
        """kill -9."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), START_S)


async def start(directory: Path, *flags: str) -> asyncio.subprocess.Process:
    """Start a buffer on the data directory, on a free port."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "services.cli.main",
        "buffer",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        str(directory),
        *flags,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def buffer_process(directory: Path, *flags: str) -> AsyncIterator[BufferProcess]:
    """A buffer on the data directory; killed at the end if it still runs."""
    process = await start(directory, *flags)
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        found = re.search(r"listening on (\S+)", line)
        assert found, f"it said {line!r}, and: {(await errors).decode() if process.returncode is not None else ''}"
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(found[1], options=options) as channel:
            yield BufferProcess(process, found[1], channel)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        await errors
