"""A scheduler that dies at any await point of a step goes on where it stopped: docs/recovery.md, row by row.

Each scenario is run once undisturbed, which counts its await points, and then once for every point, with a kill there.
The trainer only repeats its calls; what the engines see, what it is told and what is recorded must come out the same.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from services.runtime.errors import failed_precondition
from services.scheduler import policies
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import Action, Decision, Event, Point, PolicyConfig
from tests.scheduler.killing import Points, install, persistently, reviving
from tests.scheduler.world import Trainer, World, run_config, world
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

OBSERVATIONS = ("depth_observed", "topology_changed", "decision_made/WAITING/KEEP")
"""Readings, and what a policy made of them within a wait: while the scheduler is away it takes fewer."""


@dataclass
class Life:
    """One run through a scenario, and what came of it."""

    w: World
    points: Points
    trainer: Trainer
    told: list[str] = field(default_factory=list)
    lends: dict[str, str] = field(default_factory=dict)

    async def call(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call of the trainer, with what it was told."""
        answer = await persistently(self.points, call)
        self.told.append(f"{what}: {self._essence(answer)}")
        if getattr(answer, "mode", None) == events_pb2.MODE_TRAINER or (
            isinstance(answer, pb.BeginSampleDone) and answer.HasField("proceed")
        ):
            assert self.w.engine.all_free, f"{what} let the trainer train while engines hold its memory"
        return answer

    def _essence(self, answer: Any) -> str:
        """An answer without ids and durations, which differ from life to life."""
        if not isinstance(answer, Message):
            return ""
        copy = type(answer)()
        copy.CopyFrom(answer)
        for name in ("metrics", "cost", "next_cursor"):
            if name in copy.DESCRIPTOR.fields_by_name:
                copy.ClearField(name)
        if "decision" in copy.DESCRIPTOR.fields_by_name and copy.HasField("decision"):
            decision = copy.decision  # type: ignore[attr-defined]
            decision.ClearField("numbers")
            decision.ClearField("predicted_wait")
            decision.ClearField("reason")
        if isinstance(copy, pb.BeginSampleDone) and copy.HasField("proceed"):
            copy.proceed.ClearField("reclaim")
        if "lend" in copy.DESCRIPTOR.fields_by_name and copy.HasField("lend"):
            lend = copy.lend  # type: ignore[attr-defined]
            lend.lend_id = self._name(lend.lend_id)
        return str(copy)

    def _name(self, lend_id: str) -> str:
        return self.lends.setdefault(lend_id, f"lend {len(self.lends)}") if lend_id else ""

    async def begin(self, step: int) -> None:
        await self.call(f"begin {step}", lambda: self.trainer.begin(step))

    async def prepare(self, step: int, attempt: int = 0) -> None:
        await self.call(f"prepare {step}", lambda: self.trainer.prepare(step, attempt))

    async def samples(self, step: int) -> None:
        for mini_batch in range(4):
            await self.sample(step, mini_batch)

    async def sample(self, step: int, mini_batch: int, attempt: int = 0) -> pb.BeginSampleDone:
        done: pb.BeginSampleDone = await self.call(
            f"sample {step}/{mini_batch}", lambda: self.trainer.begin_sample(step, mini_batch, attempt)
        )
        if done.HasField("proceed"):
            await self.call("end sample", lambda: self.trainer.end_sample(step, mini_batch, wait=3.0))
        return done

    async def end(self, step: int) -> pb.EndStepResponse:
        ended: pb.EndStepResponse = await self.call(f"end {step}", lambda: self.trainer.end(step))
        return ended

    async def complete(self, lend: pb.Lend) -> None:
        await self.call("complete", lambda: self.trainer.complete(lend))

    async def outcome(self) -> tuple[list[str], list[tuple[str, str]], Counter[str]]:
        """What the trainer was told, how the engines were moved (repeats left out), and what was recorded."""
        await self.points.recovered.wait()
        moves = [(call, self._name(lend_id)) for call, lend_id in self.w.engine.moves]
        events = await persistently(self.points, self.trainer.events)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        kinds = Counter(map(_kind, events))
        for kind in OBSERVATIONS:
            del kinds[kind]
        return self.told, [move for move, _ in itertools.groupby(moves)], kinds


def _kind(event: events_pb2.RunEvent) -> str:
    if not event.HasField("decision_made"):
        return str(event.WhichOneof("event"))
    point = events_pb2.DecisionPoint.Name(event.decision_made.point).removeprefix("DECISION_POINT_")
    action = events_pb2.DecisionAction.Name(event.decision_made.action).removeprefix("DECISION_ACTION_")
    return f"decision_made/{point}/{action}"


Scenario = Callable[[Life], Awaitable[None]]


async def a_step_with_a_lend(life: Life) -> None:
    """Reclaimed at BeginStep, lent at EndStep, reclaimed by the wait of the next PrepareStep."""
    buffer = life.w.buffer
    await buffer.set_depth(8)
    await life.begin(1)
    await life.prepare(1)
    await life.samples(1)
    await buffer.set_depth(2)
    await life.complete((await life.end(1)).lend)
    await life.begin(2)
    waiting = asyncio.ensure_future(life.prepare(2))
    await asyncio.sleep(0.03)
    await buffer.set_depth(8)
    await waiting
    await life.sample(2, 0)


async def supply_that_falls_short(life: Life) -> None:
    """The wait ends EXHAUSTED, and the trainer may end its step at once: a fact that no later reading tells."""
    buffer = life.w.buffer
    await buffer.set_depth(2)
    await life.begin(1)
    waiting = asyncio.ensure_future(life.prepare(1))
    await asyncio.sleep(0.03)
    await buffer.set_depth(3, in_flight=1)
    await waiting
    await life.end(1)


async def a_lend_that_does_not_come_about(life: Life) -> None:
    """The controller refuses to begin it: it is undone, and the trainer proceeds."""
    await life.w.buffer.set_depth(8)
    await life.begin(1)
    await life.prepare(1)
    await life.samples(1)
    await life.w.buffer.set_depth(2)
    life.w.engine.script.failures["BeginLend"] = [failed_precondition("NOT_NOW", "no") for _ in range(9)]
    ended = await life.end(1)
    assert "NOT_NOW" in ended.lend_failure or "no" in ended.lend_failure
    life.w.engine.script.failures["BeginLend"] = []
    await life.begin(2)
    await life.prepare(2)


async def a_lend_that_the_trainer_abandons(life: Life) -> None:
    """Its weights could not be installed."""
    await life.w.buffer.set_depth(8)
    await life.begin(1)
    await life.prepare(1)
    await life.samples(1)
    await life.w.buffer.set_depth(2)
    ended = await life.end(1)
    await life.call("abandon", lambda: life.trainer.abandon(ended.lend))
    await life.begin(2)
    await life.prepare(2)


async def validation_and_a_checkpoint(life: Life) -> None:
    """Hybrids are lent for a validation, and the state is saved."""
    await life.w.buffer.set_depth(16)
    await life.begin(1)
    await life.prepare(1)
    await life.samples(1)
    saved = await persistently(life.points, lambda: life.trainer.save(1))
    await life.end(1)
    validation = await life.call("validate", lambda: life.trainer.begin_validation(1))
    await life.complete(validation.lend)
    await life.call("validated", lambda: life.trainer.end_validation(1))
    await life.begin(2)
    assert set(life.w.buffer.checkpoints) == {saved.checkpoint_id}, "a checkpoint was asked for twice"


async def a_lend_within_a_step(life: Life) -> None:
    """The policy lends while the trainer starves, and takes back when its groups are there."""
    buffer = life.w.buffer
    await buffer.set_depth(8)
    await life.begin(1)
    await life.prepare(1)
    await buffer.set_depth(1)
    done = await life.sample(1, 0)
    await life.complete(done.lend)
    waiting = asyncio.ensure_future(life.sample(1, 0, attempt=1))
    await asyncio.sleep(0.03)
    await buffer.set_depth(8)
    await waiting
    await life.sample(1, 1)


class Eager:
    """verl, but it lends where the trainer starves."""

    name = "verl"

    def __init__(self, config: PolicyConfig) -> None:
        self._verl = policies.create("verl", config)
        self._starving = False

    def observe(self, event: Event) -> None:
        self._verl.observe(event)
        sampleable = getattr(event, "sampleable", None)
        if type(event).__name__ == "StarvationBegan" and sampleable is not None:
            self._starving = sampleable < 4

    def decide(self, point: Point, now: float) -> Decision:
        if point is Point.SAMPLE_BEGIN and self._starving:
            return Decision(action=Action.LEND, reason="It starves.")
        return self._verl.decide(point, now)


def eager(name: str, config: PolicyConfig) -> Policy:
    return Eager(config)


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any], dict[str, Any]]] = {
    "step": (a_step_with_a_lend, {}, {}),
    "exhausted": (supply_that_falls_short, {}, {}),
    "refused": (a_lend_that_does_not_come_about, {}, {}),
    "abandoned": (a_lend_that_the_trainer_abandons, {}, {}),
    "validation": (validation_and_a_checkpoint, {}, {}),
    "within": (a_lend_within_a_step, {"can_reinstall": True}, {"create": eager}),
}


async def live(
    name: str, data_dir: Path, kill_at: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[tuple[str, str]], Counter[str], list[str]]:
    """One life; what came of it, and its await points."""
    scenario, config, options = SCENARIOS[name]
    points = Points(kill_at)
    with monkeypatch.context() as patched:
        install(points, patched)
        async with world(data_dir=data_dir, watch_progress=False, transition_attempts=1, **options) as w:
            trainer = await w.trainer(run_config(**config))
            w.engine.moves.clear()
            life = Life(w, points, trainer)
            points.armed = True
            async with asyncio.timeout(20), reviving(w, points):
                await scenario(life)
                points.armed = False
                return (*await life.outcome(), points.passed)


async def check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    told, moves, kinds, passed = await live(name, tmp_path / "undisturbed", 0, monkeypatch)
    assert len(passed) > 20
    for kill_at in range(1, len(passed) + 1, stride):
        where = f"killed at point {kill_at}, {passed[kill_at - 1]}"
        try:
            told_then, moves_then, kinds_then, _ = await live(name, tmp_path / f"{kill_at}", kill_at, monkeypatch)
        except (TimeoutError, AssertionError, grpc.aio.AioRpcError) as error:
            raise AssertionError(where) from error
        assert told_then == told, where
        assert moves_then == moves, where
        assert kinds_then == kinds, where


async def open_run(w: World, request: pb.OpenRunRequest) -> pb.OpenRunResponse:
    return await w.stub.OpenRun(request)


async def an_opening(data_dir: Path, kill_at: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A trainer is let in, takes over from itself with its GPUs lent, and closes; the await points of all that."""
    points = Points(kill_at)
    with monkeypatch.context() as patched:
        install(points, patched)
        async with world(data_dir=data_dir, watch_progress=False, transition_attempts=1) as w:
            engine = w.engine
            points.armed = True
            async with asyncio.timeout(20), reviving(w, points):
                epoch = 0
                requests = (
                    w.open_request(request_id="first"),
                    w.open_request(
                        request_id="second", resume=pb.Resume(resume_step=0, keep_live=True), take_over=True
                    ),
                )
                for number, request in enumerate(requests, start=1):
                    # Clients give every opening an id, so that a reply that was lost is told again.
                    opened = await persistently(points, partial(open_run, w, request))
                    assert opened.epoch > epoch
                    assert engine.epoch == w.buffer.runs["run"].epoch == opened.epoch
                    epoch = opened.epoch
                    trainer = Trainer(w.stub, epoch)
                    await persistently(points, partial(trainer.complete, opened.lend))
                    run = await persistently(points, trainer.run)
                    assert (run.mode, run.epoch, run.lends) == (events_pb2.MODE_ROLLOUT, epoch, number)
                close = pb.CloseRunRequest(run_id="run", epoch=epoch, reason="done")

                async def closing() -> None:
                    await w.stub.CloseRun(close)

                await persistently(points, closing)
                points.armed = False
                await points.recovered.wait()
                events = await persistently(points, trainer.events)
                kinds = Counter(map(_kind, events))
                assert (kinds["lend_done"], kinds["run_closed"]) == (2, 1)
                assert [event.sequence for event in events] == list(range(1, len(events) + 1))
                return points.passed


async def check_openings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    passed = await an_opening(tmp_path / "undisturbed", 0, monkeypatch)
    assert len(passed) > 20
    for kill_at in range(1, len(passed) + 1, stride):
        try:
            await an_opening(tmp_path / f"{kill_at}", kill_at, monkeypatch)
        except (AssertionError, grpc.aio.AioRpcError) as error:
            raise AssertionError(f"killed at point {kill_at}, {passed[kill_at - 1]}") from error


async def test_a_kill_at_some_points_of_an_opening_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer whose OpenRun was cut must not wait for the lease of the epoch that it never heard of."""
    await check_openings(tmp_path, monkeypatch, stride=7)


@pytest.mark.slow
async def test_a_kill_at_any_point_of_an_opening_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same at every point."""
    await check_openings(tmp_path, monkeypatch, stride=1)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_kill_at_some_await_points_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background task of a run dies with its process; what it was doing must not be gone without a trace."""
    await check(name, tmp_path, monkeypatch, stride=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_kill_at_any_await_point_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same at every point."""
    await check(name, tmp_path, monkeypatch, stride=1)
