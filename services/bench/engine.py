"""What the engine controller adds to its engines: to single calls, to requests, to a reclaim, to a fan-out; and how
soon it knows of a death.

Invariants: the baseline of a call is the same call on the node agent that the controller drives, in turns with it; that
of a fan-out is the same call on one of its replicas. Times are wall milliseconds, medians over rounds.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from services.bench.engine_world import (
    RUN,
    Side,
    World,
    many,
    only,
    replica_name,
    timed,
    world,
)
from services.bench.result import Result
from turnout.engine.v1 import engine_pb2 as pb

CALLS: Final = ("sleep", "wake", "pause", "resume", "reset")
STREAMS: Final = 8
REPLICAS: Final = 64

SLEEP_S: Final = 0.5
"""What an engine takes to free its memory: vLLM needs that for a small model, and seconds for a large one."""

PAUSE_S: Final = 0.022
"""What vLLM takes to pause an idle engine."""

MOST_ADDED_MS: Final = 5.0
"""What a call may take longer through the controller."""

LEAST_SHARE: Final = 0.95
"""Of the tokens per second of the agent alone."""

MOST_RECLAIM_MS: Final = 100.0
"""What a reclaim may take longer than the engine's own sleep."""

MOST_TIMES: Final = 2.0
"""How much longer a fan-out may take than one replica."""

MOST_DEATH_MS: Final = 1000.0
"""Within which an engine's death is known."""

GIVE_UP_S: Final = 60.0
"""After which a death that nobody tells of ends the bench."""

FIGURES: Final = (
    *(f"engine_{call}" for call in CALLS),
    f"generate_{STREAMS}",
    "reclaim",
    "idle_death_of_an_engine",
    "idle_death_of_an_agent",
    f"fan_out_{REPLICAS}_sleep",
    f"fan_out_{REPLICAS}_pause",
    f"fan_out_{REPLICAS}_pause_at_once",
    f"fan_out_{REPLICAS}_one_hung",
)
"""The engines of `pause_at_once` take no time at all: what is left is the controller's own work, 64 times that of one
replica, so this one has no limit."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    """Slots of each side."""
    calls: int
    """Cycles of single calls in a slot."""
    tokens: int
    """Tokens of each stream in a slot."""


THOROUGH: Final = Effort(rounds=5, calls=20, tokens=300)
QUICK: Final = Effort(rounds=1, calls=2, tokens=20)
"""Shows that everything runs; its values mean nothing."""


async def measure(only_names: Collection[str] = (), *, quick: bool = False) -> AsyncIterator[Result]:
    """Yield the figures of these names, all of them if there are none."""
    effort = QUICK if quick else THOROUGH
    wanted = set(only_names) or set(FIGURES)
    with tempfile.TemporaryDirectory(prefix="turnout-bench-") as place:
        if wanted - {name for name in FIGURES if name.startswith("fan_out")}:
            async with world(Path(place) / "world", SLEEP_S) as served:
                if any(name.startswith("engine_") for name in wanted):
                    for result in await _single_calls(served, effort):
                        if result.name in wanted:
                            yield result
                if f"generate_{STREAMS}" in wanted:
                    yield await _generate(served, effort)
                if "reclaim" in wanted:
                    yield await _reclaim(served, effort)
                # Last, since nothing comes back from it.
                for victim, replica_id, method in (("engine", "s0", "fault_die"), ("agent", "c0", "fault_exit")):
                    name = f"idle_death_of_an_{victim}"
                    if name in wanted:
                        agent = served.standalone if victim == "engine" else served.quick
                        taken = await _idle_death(served.ours, agent, replica_id, method)
                        yield Result(name, "ms", 1000 * taken, 0.0, MOST_DEATH_MS)
        if any(name.startswith("fan_out") for name in wanted):
            async with many(Path(place) / "many", REPLICAS, SLEEP_S) as side:
                async for result in _fan_out(side, effort):
                    if result.name in wanted:
                        yield result


async def _single_calls(served: World, effort: Effort) -> list[Result]:
    taken: dict[tuple[str, bool], list[float]] = {}
    for _ in range(effort.rounds):
        for side, replica_id in ((served.ours, "c0"), (served.quick, "c1")):
            for _ in range(effort.calls):
                for name, call in zip(CALLS, _cycle(side), strict=True):
                    taken.setdefault((name, side is served.quick), []).append(await timed(call(replica_id)))
    results = []
    for name in CALLS:
        value, baseline = (1000 * median(taken[name, direct]) for direct in (False, True))
        results.append(Result(f"engine_{name}", "ms", value, baseline, baseline + MOST_ADDED_MS))
    return results


def _cycle(side: Side) -> tuple[Callable[[str], Awaitable[None]], ...]:
    return side.sleep, side.wake_up, side.pause, side.resume, side.reset


async def _generate(served: World, effort: Effort) -> Result:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(effort.rounds):
        for side, bare in ((served.ours, False), (served.standalone, True)):
            begin = time.perf_counter()
            streams = (side.generate("s0", f"g{number}-{bare}-{i}", effort.tokens) for i in range(STREAMS))
            tokens = sum(await asyncio.gather(*streams))
            rates[bare].append(tokens / (time.perf_counter() - begin))
    value, baseline = median(rates[False]), median(rates[True])
    return Result(f"generate_{STREAMS}", "tokens/s", value, baseline, LEAST_SHARE * baseline, at_least=True)


async def _reclaim(served: World, effort: Effort) -> Result:
    """From the call to "confirmed free", with requests running, beside a Sleep of the same engine as busy."""
    ours, bare = served.ours.stub, served.slow
    taken: list[float] = []
    own: list[float] = []
    for number in range(effort.rounds):
        lend_id = f"lend-{number}"
        await ours.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id=lend_id, replica_ids=["h0"]))
        await ours.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id=lend_id, weight_version=0))
        # Half of them are placed on the standalone replica.
        async with served.ours.busy("h0", 2 * STREAMS, STREAMS):
            taken.append(await timed(ours.Reclaim(pb.ReclaimRequest(run_id=RUN, replica_ids=["h0"]))))
        async with bare.busy("h1", STREAMS, STREAMS):
            own.append(await timed(bare.sleep("h1")))
        await bare.wake_up("h1")
    value, baseline = 1000 * median(taken), 1000 * median(own)
    return Result("reclaim", "ms", value, baseline, baseline + MOST_RECLAIM_MS)


async def _idle_death(ours: Side, agent: Side, replica_id: str, method: str) -> float:
    """Seconds from the death of an engine, or of its agent, in which nothing runs, until the controller tells of it."""
    died = asyncio.Event()

    async def watch() -> None:
        async for told in ours.stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN)):
            if any((one.spec.replica_id, one.health) == (replica_id, pb.REPLICA_HEALTH_DEAD) for one in told.changed):
                died.set()

    watching = asyncio.create_task(watch())
    begin = time.perf_counter()
    try:
        # Of an agent that exits there is no answer.
        await asyncio.gather(_fault([replica_id], agent, method), return_exceptions=True)
        async with asyncio.timeout(GIVE_UP_S):
            await died.wait()
        return time.perf_counter() - begin
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _fan_out(side: Side, effort: Effort) -> AsyncIterator[Result]:
    everyone = [replica_name(number) for number in range(REPLICAS)]
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(effort.rounds):
        for chosen in (everyone[:1], everyone):
            selector = only(*chosen)
            at_once = await timed(side.stub.Pause(pb.PauseRequest(run_id=RUN, selector=selector)))
            sleep = pb.SleepRequest(run_id=RUN, selector=selector, level=pb.SLEEP_LEVEL_ONE)
            asleep = await timed(side.stub.Sleep(sleep))
            await side.stub.WakeUp(pb.WakeUpRequest(run_id=RUN, selector=selector))
            await _fault(chosen, side, "fault_slow", seconds=PAUSE_S)
            paused = await timed(side.stub.Pause(pb.PauseRequest(run_id=RUN, selector=selector)))
            await _fault(chosen, side, "fault_heal")
            await side.stub.Resume(pb.ResumeRequest(run_id=RUN, selector=selector))
            for name, seconds in (("sleep", asleep), ("pause", paused), ("pause_at_once", at_once)):
                taken.setdefault((name, len(chosen)), []).append(seconds)
    for name in ("sleep", "pause", "pause_at_once"):
        value, baseline = (1000 * median(taken[name, count]) for count in (REPLICAS, 1))
        limit = None if name == "pause_at_once" else MOST_TIMES * baseline
        yield Result(f"fan_out_{REPLICAS}_{name}", "ms", value, baseline, limit)
    yield await _one_hung(side, everyone)


async def _one_hung(side: Side, everyone: list[str]) -> Result:
    """The slowest of the replicas that answer, while one hangs, beside the slowest while none does."""
    whole = await _slowest_sleep(side, everyone, everyone)
    await side.stub.WakeUp(pb.WakeUpRequest(run_id=RUN))
    await _fault(everyone[:1], side, "fault_hang")
    with_hung = await _slowest_sleep(side, everyone, everyone[1:])
    await _fault(everyone[:1], side, "fault_heal")
    return Result(f"fan_out_{REPLICAS}_one_hung", "ms", 1000 * with_hung, 1000 * whole, MOST_TIMES * 1000 * whole)


async def _slowest_sleep(side: Side, selected: list[str], counted: list[str]) -> float:
    """Seconds until the last of the counted replicas is known to be asleep."""
    asleep = {replica_id: asyncio.Event() for replica_id in counted}
    begin = time.perf_counter()

    async def watch() -> None:
        async for told in side.stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN)):
            for replica in told.changed:
                if not replica.resident_tags and replica.spec.replica_id in asleep:
                    asleep[replica.spec.replica_id].set()

    watching = asyncio.create_task(watch())
    request = pb.SleepRequest(run_id=RUN, selector=only(*selected), level=pb.SLEEP_LEVEL_ONE)
    request.timeout.FromMilliseconds(round(4000 * SLEEP_S))
    call = asyncio.ensure_future(_ended(side.stub.Sleep(request)))
    try:
        await asyncio.gather(*(event.wait() for event in asleep.values()))
        return time.perf_counter() - begin
    finally:
        watching.cancel()
        await asyncio.gather(watching, call, return_exceptions=True)


async def _ended(call: Awaitable[object]) -> None:
    await call


async def _fault(chosen: Sequence[str], side: Side, method: str, **named: object) -> None:
    arguments = json.dumps({"kwargs": named}) if named else ""
    request = pb.CollectiveRpcRequest(run_id=RUN, selector=only(*chosen), method=method, arguments_json=arguments)
    await side.stub.CollectiveRpc(request)
