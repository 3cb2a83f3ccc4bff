"""The whole deployment under a steady load: is anything refused, lost, late, or forgotten in memory?

Invariants: everything runs as it is deployed, in processes of its own, and everybody uses the client that is shipped;
nothing is killed on purpose, so any error is one too many; what is measured begins once the buffer is full; memory is
judged after its first minute (a quarter of a shorter run), in which caches and pools come to their size.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from services.bench.cpu import processor_seconds
from services.bench.load_deployment import Deployment, deploy
from services.bench.load_ledger import RunLedger, close, follow, read_notes
from services.bench.load_memory import MemoryWatch
from services.bench.load_plan import Errand, Plan
from services.bench.load_process import Errors
from services.bench.load_trainers import PARTITION
from services.bench.result import Result
from services.processes.child import Child, ChildSpec
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient

P99_MS: Final = 20.0
"""A depth query may take so long: a trainer's loop and a dashboard do not notice it."""

SLOPE_MIB: Final = 0.5
"""Growth per minute that passes for flat: less than a gigabyte in a day."""

SETTLING_S: Final = 60.0
FILL_WITHIN_S: Final = 600.0
_EVENTS_WITHIN_S: Final = 60.0
_TELL_S: Final = 60.0

Say = Callable[[str], None]


@dataclass(slots=True)
class Words:
    """What a process of the bench said, by kind."""

    name: str
    kinds: dict[str, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def of(self, kind: str) -> asyncio.Future[dict[str, Any]]:
        """What it said under this kind, once it did."""
        return self.kinds.setdefault(kind, asyncio.get_running_loop().create_future())

    def hear(self, line: str) -> None:
        """Take a line of its stdout."""
        told = json.loads(line)
        self.of(told["kind"]).set_result(told)


async def measure(plan: Plan, directory: Path, *, secure: bool = True, say: Say = lambda _: None) -> list[Result]:
    """Return the figures. `say` gets what happens, for a person; faults too.

    Raises ChildFailed, NoCertificate, TurnoutError, TimeoutError.
    """
    errors = Errors()
    async with deploy(plan, directory, errors, secure=secure) as deployment:
        say(f"{plan.runs} runs, {plan.workers} workers, {'TLS and tokens' if secure else 'open'}")
        return await deployment.fleet.run(_Bench(plan, directory, deployment, errors, say).run())


class _Bench:
    def __init__(self, plan: Plan, directory: Path, deployment: Deployment, errors: Errors, say: Say) -> None:
        self._plan = plan
        self._directory = directory
        self._deployment = deployment
        self._errors = errors
        self._say = say
        self._notes = directory / "trainers.jsonl"
        self._ledgers = {run_id: RunLedger(run_id) for run_id in plan.run_ids}
        self._faults = 0

    async def run(self) -> list[Result]:
        plan, deployment = self._plan, self._deployment
        runs = plan.run_ids
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncBufferClient(deployment.access.buffer, deployment.access.options("reader"))
            )
            trainers, trainers_said = await self._start("load_trainers", runs)
            workers = [await self._start("load_workers", [run_id]) for run_id in runs]
            await self._until_created(client)
            following = [asyncio.create_task(follow(client, ledger)) for ledger in self._ledgers.values()]
            stack.push_async_callback(_cancel, following)
            async with asyncio.timeout(FILL_WITHIN_S):
                await trainers_said.of("filled")
            self._say(f"{plan.groups} groups are there; measuring for {plan.seconds:g} s")
            probe, probe_said = await self._start("load_probe", runs)
            # A short run has to have enough readings for a slope, too.
            memory = MemoryWatch(deployment.pids, min(1.0, plan.seconds / 60))
            watching = asyncio.create_task(memory.run())
            stack.push_async_callback(_cancel, [watching])
            before = self._processor_seconds()
            await self._pass_time(memory)
            used = {name: after - before[name] for name, after in self._processor_seconds().items()}
            await _cancel([watching])
            for child in (probe, trainers, *(child for child, _ in workers)):
                await self._end(child)
            asked = probe_said.of("done").result()
            stepped = trainers_said.of("done").result()
            for said in (probe_said, trainers_said, *(said for _, said in workers)):
                self._take_errors(said)
            await _cancel(following)
            self._say("accounting for every group")
            await self._account(client)
        return self._results(asked, stepped, memory, used)

    async def _pass_time(self, memory: MemoryWatch) -> None:
        left = self._plan.seconds
        while left > 0:
            part = min(_TELL_S, left)
            await asyncio.sleep(part)
            left -= part
            now = ", ".join(f"{name} {readings[-1][1]:.0f} MiB" for name, readings in memory.readings.items())
            self._say(f"{left:.0f} s left: {now}, {self._errors.count} errors")

    async def _start(self, module: str, runs: Sequence[str]) -> tuple[Child, Words]:
        errand = Errand(self._plan, self._deployment.access, tuple(runs), str(self._notes))
        name = f"{module} {runs[0]}"
        words = Words(name)
        spec = ChildSpec(name, f"services.bench.{module}", (errand.to_argument(),), ready=None)
        child = await self._deployment.fleet.start(
            spec,
            on_line=words.hear,
            on_error_line=lambda line: self._errors.add(f"{name} wrote: {line}"),
        )
        return child, words

    async def _end(self, child: Child) -> None:
        finished = asyncio.create_task(self._deployment.fleet.finish(child))
        await asyncio.sleep(0)
        child.process.terminate()
        if await finished:
            raise child.failure()

    def _take_errors(self, said: Words) -> None:
        told = said.of("done").result()
        self._errors.count += told["errors"] - len(told["messages"])
        for message in told["messages"]:
            self._errors.add(f"{said.name}: {message}")

    async def _until_created(self, client: AsyncBufferClient) -> None:
        async with asyncio.timeout(FILL_WITHIN_S):
            while True:
                there = (await client.calls.ListRuns(buffer_pb2.ListRunsRequest())).runs
                if {run.run_id for run in there} >= set(self._plan.run_ids):
                    return
                await asyncio.sleep(0.1)

    def _processor_seconds(self) -> dict[str, float]:
        return {name: processor_seconds(pids) for name, pids in self._deployment.pids.items()}

    async def _account(self, client: AsyncBufferClient) -> None:
        with self._notes.open(encoding="utf-8") as lines:
            read_notes(lines, self._ledgers)
        for ledger in self._ledgers.values():
            last = await close(client, ledger, PARTITION)
            async with asyncio.timeout(_EVENTS_WITHIN_S):
                await follow(client, ledger, until=last)
            for fault in ledger.faults():
                self._faults += 1
                self._say(fault)

    def _results(
        self, asked: dict[str, Any], stepped: dict[str, Any], memory: MemoryWatch, used: dict[str, float]
    ) -> list[Result]:
        plan = self._plan
        for message in self._errors.messages:
            self._say(message)
        ours, bare = sorted(asked["ours"]), sorted(asked["bare"])
        consumed = sum(ledger.sampled.total() for ledger in self._ledgers.values())
        results = [
            Result("load_errors", "", self._errors.count, 0, limit=0),
            Result("load_ledger_faults", "", self._faults, 0, limit=0),
            Result("load_depth_p50", "ms", 1e3 * _quantile(ours, 0.5), 1e3 * _quantile(bare, 0.5)),
            Result("load_depth_p99", "ms", 1e3 * _quantile(ours, 0.99), 1e3 * _quantile(bare, 0.99), limit=P99_MS),
            Result("load_depth_max", "ms", 1e3 * ours[-1], 1e3 * bare[-1]),
            Result(
                "load_groups", "groups/s", consumed / plan.seconds, plan.offered, 0.95 * plan.offered, at_least=True
            ),
            Result("load_resident", "groups", asked["least"], plan.groups, plan.least_resident, at_least=True),
            Result("load_step_late_max", "s", max(stepped["late"], default=0.0), 0),
        ]
        for name, seconds in used.items():
            if name != "bare":
                results.append(Result(f"load_cpu_{name}", "% of one core", 100 * seconds / plan.seconds, 0))
        after = min(SETTLING_S, plan.seconds / 4)
        bare_slope = memory.slope("bare", after).per_minute
        for name in (name for name in memory.readings if name != "bare"):
            found = memory.slope(name, after)
            last = memory.readings[name][-1][1]
            results += [
                Result(f"load_memory_{name}", "MiB", last, memory.readings["bare"][-1][1]),
                Result(f"load_memory_slope_{name}", "MiB/min", found.per_minute, bare_slope, limit=SLOPE_MIB),
                Result(f"load_memory_slope_{name}_margin", "MiB/min", found.margin, 0),
            ]
        return results


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that so large a share does not pass."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
