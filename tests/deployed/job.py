"""The demo's job on a site: trainer and workers are processes that know the services by their addresses and tokens.

Invariant: the trainer is started once; what it says is kept line by line, and nothing else tells what became of a step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from services.demo.assignment import READY, Assignment
from services.demo.job import Job
from services.demo.prompts import sample_file
from services.demo.stack import engine_flags
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.runtime.permissions import Role
from tests.deployed.site import SERVICES, Site

WORKERS: Final = 2


def small_job(**changes: Any) -> Job:
    """Steps of some seconds: small batches, short responses, fast time."""
    values: dict[str, Any] = {
        "switching": True,
        "time_scale": 0.01,
        "steps": 12,
        "group_size": 2,
        "mini_batch_size": 4,
        "mini_batches": 2,
        "training_s": 200.0,
        "mean_tokens": 3000.0,
        "max_tokens": 6000,
        "standalone_nodes": 2,
        "hybrid_nodes": 1,
    }
    return Job(**{**values, **changes})


def start(site: Site, job: Job) -> None:
    """Start services and agents for a job: two of standalone replicas, one of hybrid ones. Registers them."""
    scale = f"--time-scale={job.time_scale!r}"
    for service in SERVICES:
        probes = ["--probe-interval=1", "--probe-timeout=2"] if service == "engine" else []
        site.member(service, scale, *probes)
    for name, role in (("standalone-a", "standalone"), ("standalone-b", "standalone"), ("hybrid", "hybrid")):
        replicas = [f"{name}-{number}:{role}" for number in range(2)]
        site.member(f"agent-{role}", scale, *engine_flags(job, role), name=name, replicas=replicas)
    for member in site.members.values():
        member.launch()
    for member in site.members.values():
        member.ready()
    site.register()


class Running:
    """A job at work."""

    def __init__(self, job: Job, targets: Mapping[str, str], environment: Callable[[Role], dict[str, str]]) -> None:
        """`targets`: of the services; `environment`: what lets a process of a role in."""
        self._assignment = Assignment(job, sample_file(), **targets)
        self._environment = environment
        self._heard = asyncio.Event()
        self.lines: list[dict[str, Any]] = []
        """What the trainer said."""
        self.trainer: Child

    async def start(self, fleet: Fleet) -> None:
        """Start the workers, and the trainer after them."""
        for number in range(WORKERS):
            own = replace(self._assignment, worker_id=f"worker-{number}").to_json()
            environment = self._environment(Role.WORKER)
            spec = ChildSpec(f"worker-{number}", "services.demo.worker", (own,), READY, environment)
            await fleet.start(spec)
        environment = self._environment(Role.TRAINER)
        spec = ChildSpec("trainer", "services.demo.trainer", (self._assignment.to_json(),), None, environment)
        self.trainer = await fleet.start(spec, on_line=self._hear)

    def _hear(self, line: str) -> None:
        if line.startswith("{"):
            self.lines.append(json.loads(line))
            self._heard.set()

    def said(self, event: str, **values: Any) -> list[dict[str, Any]]:
        """The trainer's lines of this kind."""
        wanted = {"event": event, **values}.items()
        return [line for line in self.lines if wanted <= line.items()]

    async def until(self, event: str, within_s: float = 90.0, **values: Any) -> None:
        """Return once the trainer has said this."""
        async with asyncio.timeout(within_s):
            while not self.said(event, **values):
                self._heard.clear()
                heard = asyncio.ensure_future(self._heard.wait())
                await asyncio.wait([heard, self.trainer.ended], return_when=asyncio.FIRST_COMPLETED)
                heard.cancel()
                if self.trainer.ended.done() and not self.said(event, **values):
                    raise AssertionError(f"the trainer ended: {' | '.join(self.trainer.last_lines)}")

    async def done(self, within_s: float = 120.0) -> dict[str, Any]:
        """Wait for the trainer's end, which must be a good one; the ledger that it told last."""
        async with asyncio.timeout(within_s):
            code = await asyncio.shield(self.trainer.ended)
        assert code == 0, list(self.trainer.last_lines)
        return self.said("ledger")[-1]


@asynccontextmanager
async def running(site: Site, job: Job) -> AsyncIterator[Running]:
    """A job at work for the length of a block; the services are there."""
    targets = {name: site.members[name].target for name in SERVICES}
    async with at_work(Running(job, targets, site.environment)) as made:
        yield made


@asynccontextmanager
async def at_work(made: Running) -> AsyncIterator[Running]:
    """The job's processes, for the length of a block."""
    async with Fleet() as fleet:
        await made.start(fleet)
        yield made
