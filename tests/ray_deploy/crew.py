"""Trainer and workers of a deployed job: started again whenever they end, as their cluster's manager would.

Invariants: leaving it ends every process; each life's end that nobody asked for is counted with its last words.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from services.demo.assignment import Assignment
from services.demo.job import Job
from services.demo.prompts import sample_file
from services.processes.child import Child, ChildSpec
from turnout.ray import Deployment

ROOT: Final = Path(__file__).parents[2]
AGAIN_S: Final = 0.2


@dataclass(slots=True)
class Member:
    """One process over all its lives."""

    name: str
    module: str
    arguments: tuple[str, ...]
    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """When it said what, monotonic."""
    ends: list[str] = field(default_factory=list)
    lives: int = 0
    child: Child | None = None
    leaving: bool = False

    async def run(self) -> int:
        """Keep it alive until it ends well; its exit code."""
        while True:
            self.lives += 1
            environment = {"PYTHONPATH": str(ROOT)}
            spec = ChildSpec(self.name, self.module, self.arguments, ready=None, environment=environment)
            self.child = await Child.start(spec, on_line=self._hear)
            code = await asyncio.shield(self.child.ended)
            if code == 0 or self.leaving:
                return code
            self.ends.append(f"{code}: {' | '.join(list(self.child.last_lines)[-3:])}")
            await asyncio.sleep(AGAIN_S)

    def _hear(self, line: str) -> None:
        if line.startswith("{"):
            self.lines.append((time.monotonic(), json.loads(line)))

    @property
    def pid(self) -> int | None:
        """Of its present life."""
        return None if self.child is None or self.child.ended.done() else self.child.process.pid


class Crew:
    """The trainer and the workers of a job; an async context manager."""

    def __init__(self, job: Job, deployment: Deployment, workers: int = 2) -> None:
        made = Assignment(
            job, sample_file(), buffer=deployment.buffer, engine=deployment.engine, scheduler=deployment.scheduler
        )
        store = deployment.store or ""
        self.trainer = Member("trainer", "tests.ray_deploy.trainer", (made.to_json(), store))
        self.workers = []
        for number in range(workers):
            name = f"worker-{number}"
            own = Assignment(job, made.prompts, made.buffer, made.engine, made.scheduler, worker_id=name)
            self.workers.append(Member(name, "tests.ray_deploy.worker", (own.to_json(), store)))
        self._running: dict[str, asyncio.Task[int]] = {}

    @property
    def members(self) -> list[Member]:
        """All of them."""
        return [self.trainer, *self.workers]

    async def __aenter__(self) -> Self:
        for member in self.members:
            self._running[member.name] = asyncio.create_task(member.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.leaving = True
            if member.child is not None:
                await member.child.stop(5.0)
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def finish(self, within_s: float) -> dict[str, Any]:
        """Let the trainer end after its step; the ledger that it told last."""
        assert self.trainer.child is not None
        self.trainer.child.process.terminate()
        return await self.done(within_s)

    async def done(self, within_s: float) -> dict[str, Any]:
        """Wait until the trainer has ended well; the ledger that it told last."""
        async with asyncio.timeout(within_s):
            assert await asyncio.shield(self._running["trainer"]) == 0
        return [line for _, line in self.trainer.lines if line["event"] == "ledger"][-1]

    def said(self, event: str) -> list[tuple[float, dict[str, Any]]]:
        """The trainer's lines of this kind, with their times."""
        return [(at, line) for at, line in self.trainer.lines if line["event"] == event]

    async def until(self, event: str, count: int, within_s: float) -> float:
        """Wait until the trainer has said this so often; when it did."""
        async with asyncio.timeout(within_s):
            while len(self.said(event)) < count:  # noqa: ASYNC110 - the lines come by a callback of their own
                await asyncio.sleep(0.05)
        return self.said(event)[count - 1][0]
