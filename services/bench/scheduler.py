"""What the switch scheduler takes: for decisions, for following requests, and for calls that do not wait.

Invariants: the scheduler runs as `serve` runs it, its journal included, between a buffer and an engine controller of
its own; the baseline of a call is a bare server that answers with the same bytes, in turns with it; both sides send and
read plain bytes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from services.bench import scheduler_policy
from services.bench.buffer_world import Side, Unary, connect
from services.bench.result import Result
from services.processes.child import ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from services.runtime.journal import Durability
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.client import duration
from turnout.scheduler.v1 import scheduler_pb2 as pb
from turnout.scheduler.v1 import scheduler_pb2_grpc

RUN: Final = "bench-scheduler"
REQUESTS: Final = 1024
OURS: Final = "/turnout.scheduler.v1.SwitchScheduler/"
BARE: Final = "/turnout.bench.BareBuffer/"
CALLS: Final = ("heartbeat", "get_run", "end_sample")
FIGURES: Final = (
    f"decision_step_end_{REQUESTS}",
    f"decision_waiting_{REQUESTS}",
    f"following_{REQUESTS}",
    *(f"scheduler_{call}" for call in CALLS),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    """Slots of each side, each a step long, and decisions and readings that are timed."""
    calls: int
    """Single calls in a slot."""


THOROUGH: Final = Effort(rounds=30, calls=40)
QUICK: Final = Effort(rounds=2, calls=3)
"""Shows that everything runs; its values mean nothing."""


@dataclass(slots=True)
class World:
    """Both servers, and the run on ours."""

    ours: Side
    bare: Side
    stub: scheduler_pb2_grpc.SwitchSchedulerAsyncStub
    epoch: int = 0


async def measure(only_names: Collection[str] = (), *, quick: bool = False) -> AsyncIterator[Result]:
    """Yield the figures of these names, all of them if there are none."""
    effort = QUICK if quick else THOROUGH
    wanted = set(only_names) or set(FIGURES)
    if any(name.startswith("decision") for name in wanted):
        for result in scheduler_policy.decisions(REQUESTS, effort.rounds):
            if result.name in wanted:
                yield result
    if f"following_{REQUESTS}" in wanted:
        yield scheduler_policy.following(REQUESTS, effort.rounds)
    if any(name.startswith("scheduler_") for name in wanted):
        with tempfile.TemporaryDirectory(prefix="turnout-bench-") as place:
            async with _world(Path(place)) as world:
                for result in await _calls(world, effort):
                    if result.name in wanted:
                        yield result


@asynccontextmanager
async def _world(directory: Path) -> AsyncIterator[World]:
    """The processes, with a run that is open and lends nothing."""
    listen = ("--listen", "127.0.0.1:0", "--log-level", "warning")
    kept = ("--data-dir", str(directory / "data"), "--durability", Durability.OS.value)
    async with Fleet() as fleet, AsyncExitStack() as stack:
        buffer, engine, scheduler, bare = await fleet.start_all(
            service_spec("buffer", *listen),
            service_spec("engine", *listen),
            service_spec("scheduler", *listen, "--metrics-listen", "127.0.0.1:0", *kept),
            ChildSpec("bare", "services.bench.bare_buffer", (str(directory),)),
        )
        to_buffer, to_ours, to_bare = [
            await stack.enter_async_context(connect(child.target)) for child in (buffer, scheduler, bare)
        ]
        create = buffer_pb2.CreateRunRequest(run_id=RUN)
        await buffer_pb2_grpc.ReplayBufferStub(to_buffer).CreateRun(create)
        world = World(
            Side(scheduler, to_ours, OURS), Side(bare, to_bare, BARE), scheduler_pb2_grpc.SwitchSchedulerStub(to_ours)
        )
        opened = await world.stub.OpenRun(
            pb.OpenRunRequest(
                run_id=RUN,
                config=pb.RunConfig(
                    train_batch_size=4,
                    parameter_sync_step=1,
                    mini_batch_size=4,
                    total_training_steps=1_000_000,
                    standalone_gpus=1,
                ),
                buffer_target=buffer.target,
                engine_target=engine.target,
            )
        )
        world.epoch = opened.epoch
        yield world


async def _calls(world: World, effort: Effort) -> list[Result]:
    taken: dict[tuple[str, bool], list[float]] = {}
    heartbeat = pb.HeartbeatRequest(run_id=RUN, epoch=world.epoch).SerializeToString()
    get_run = pb.GetRunRequest(run_id=RUN).SerializeToString()
    for step in range(1, effort.rounds + 1):
        for name, method, message in (("heartbeat", "Heartbeat", heartbeat), ("get_run", "GetRun", get_run)):
            await _slot(world, taken, (name, method), [message] * effort.calls)
        await _begin(world, step)
        end = pb.EndSampleRequest(run_id=RUN, epoch=world.epoch, step=step, wait=duration(0.5))
        # One call alone, as a mini-batch ends once: what its repeats are answered is stored already.
        await _slot(world, taken, ("end_sample", "EndSample"), [end.SerializeToString()])
        await world.stub.EndStep(pb.EndStepRequest(run_id=RUN, epoch=world.epoch, step=step))
    return [
        Result(f"scheduler_{name}", "ms", 1000 * median(taken[name, False]), 1000 * median(taken[name, True]))
        for name in CALLS
    ]


async def _begin(world: World, step: int) -> None:
    """All of a step up to its only mini-batch."""
    who = {"run_id": RUN, "epoch": world.epoch, "step": step}
    await world.stub.BeginStep(pb.BeginStepRequest(**who))  # type: ignore[arg-type]
    async for _ in world.stub.PrepareStep(pb.PrepareStepRequest(**who)):  # type: ignore[arg-type]
        pass
    async for _ in world.stub.BeginSample(pb.BeginSampleRequest(**who)):  # type: ignore[arg-type]
        pass


async def _slot(
    world: World, taken: dict[tuple[str, bool], list[float]], call: tuple[str, str], messages: list[bytes]
) -> None:
    name, method = call
    ours: Unary = world.ours.unary(method)
    bare: Unary = world.bare.unary("Unary")
    answer = await _timed(ours, messages, taken.setdefault((name, False), []))

    async def answers() -> AsyncIterator[bytes]:
        yield answer

    await world.bare.up("Answers")(answers())
    await _timed(bare, messages, taken.setdefault((name, True), []))


async def _timed(call: Unary, messages: list[bytes], taken: list[float]) -> bytes:
    """The last answer."""
    answer = b""
    for message in messages:
        begin = time.perf_counter()
        answer = await call(message)
        taken.append(time.perf_counter() - begin)
    return answer
