"""Services that the programs of all languages talk to: real processes, which can be killed and come back.

Invariants: a service keeps its address and directory over its lives; leaving a world ends every process of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 60.0
QUIET: Final = ("--log-level", "warning", "--grace-s", "1")


class Service:
    """`turnout NAME serve` on one address, over several lives."""

    def __init__(self, name: str, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.target = f"127.0.0.1:{free.getsockname()[1]}"
        self._command = (name, "serve", "--listen", self.target, *QUIET, *arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.cli.main", *self._command),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), START_S)).decode()
        assert "listening on" in line, f"{self._command[0]} did not start: {line!r}"

    async def kill(self) -> None:
        """End it as a crash would."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        await asyncio.wait_for(process.communicate(), START_S)


@dataclass
class Shared:
    """What all languages share."""

    buffer: Service
    scheduler: Service


@dataclass
class Engines:
    """What each language has for itself: a controller serves one run."""

    controller: Service
    agent: Service


@contextlib.asynccontextmanager
async def running(*services: Service) -> AsyncIterator[None]:
    try:
        await asyncio.gather(*(service.start() for service in services))
        yield
    finally:
        await asyncio.gather(*(service.stop() for service in services))


@contextlib.asynccontextmanager
async def shared(directory: Path) -> AsyncIterator[Shared]:
    """A buffer and a scheduler that remember."""
    made = Shared(
        Service("buffer", "--data-dir", str(directory / "buffer")),
        Service("scheduler", "--data-dir", str(directory / "scheduler")),
    )
    async with running(made.buffer, made.scheduler):
        yield made


@contextlib.asynccontextmanager
async def engines(directory: Path, run_id: str) -> AsyncIterator[Engines]:
    """A controller and an agent with one hybrid and one standalone replica of the reference engine."""
    made = Engines(
        Service("engine", "--data-dir", str(directory / f"engine-{run_id}")),
        Service(
            "engine",
            *("--agent", "--no-replica-weights", "--replica", "hybrid:hybrid", "--replica", "standalone:standalone"),
            # 10 to 13 ms a token and about 120 tokens: an output takes a second or two, long enough to be cut.
            *("--length-mean", "120", "--length-log-std", "0.3"),
        ),
    )
    async with running(made.controller, made.agent):
        async with AsyncEngineClient(made.controller.target) as client:
            for name, role in (
                ("hybrid", engine_pb2.REPLICA_ROLE_HYBRID),
                ("standalone", engine_pb2.REPLICA_ROLE_STANDALONE),
            ):
                spec = engine_pb2.ReplicaSpec(
                    replica_id=name,
                    role=role,
                    gpus=[engine_pb2.Gpu(node=run_id, uuid=f"GPU-{name}")],
                    backend="agent",
                    endpoint=made.agent.target,
                    weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
                )
                await client.calls.Register(engine_pb2.RegisterRequest(run_id=run_id, spec=spec))
        yield made


OnStage = Callable[[str, int], None]


def restarts(common: Shared, own: Engines, tasks: set[asyncio.Task[None]]) -> OnStage:
    """Return what kills services while a program runs: buffer and scheduler in step 2, the controller in step 3."""

    async def bring_back(*services: Service) -> None:
        await asyncio.gather(*(service.kill() for service in services))
        await asyncio.gather(*(service.start() for service in services))

    def on_stage(stage: str, step: int) -> None:
        if stage == "added" and step == 2:
            tasks.add(asyncio.create_task(bring_back(common.buffer, common.scheduler)))
        if stage == "added" and step == 3:
            tasks.add(asyncio.create_task(bring_back(own.controller)))

    return on_stage
