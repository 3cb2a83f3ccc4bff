"""What workers report of their trajectories reaches the policy, in whatever unit they count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.runtime.clock import MonotonicClock
from services.scheduler.domain.events import RunningRequest
from services.scheduler.readings import requests_of
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from tests.buffer.helpers import Caller, output, result
from tests.scheduler.test_turns import running
from tests.scheduler.world import Trainer, World, run_config, world
from turnout.buffer.v1 import buffer_pb2 as bpb
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2

FRAMES = range(4000, 6400, 150)
"""Lengths of the 16 films of a batch."""


@dataclass
class Films:
    """A trainer, a worker whose engine tells of no progress, and everything between them."""

    world: World
    buffer: Caller
    trainer: Trainer

    async def begin(self, *names: str, step: int) -> list[bpb.Claim]:
        """Add films, and let the worker begin them."""
        await self.buffer.add(*names, step=step)
        return await self.buffer.claim(len(names))

    async def report(self, claims: list[bpb.Claim], done: int) -> None:
        """Tell how many frames each has."""
        progress = [
            bpb.TrajectoryProgress(token=claim.token, group_id=claim.group_id, index=0, done=done, unit="frames")
            for claim in claims
        ]
        answer = await self.buffer.stub.ReportProgress(
            bpb.ReportProgressRequest(**self.buffer.place, progress=progress)
        )
        assert {outcome.code for outcome in answer.outcomes} == {0}

    async def finish(self, claims: list[bpb.Claim]) -> None:
        films = [
            result(claim.group_id, 0, output(tokens=frames), token=claim.token)
            for claim, frames in zip(claims, FRAMES, strict=True)
        ]
        assert {outcome.code for outcome in await self.buffer.finish(*films)} == {0}

    async def reading(self, size: int) -> events_pb2.RequestProgress:
        """The newest reading, once it tells of so many."""
        while True:
            self.world.engine.progress.append(self.world.engine.present)
            await self.world.engine.wake()
            told = [event for event in await self.trainer.events() if event.HasField("request_progress")]
            if told and len(told[-1].request_progress.requests) == size:
                return told[-1].request_progress
            await asyncio.sleep(0.02)

    async def train(self, step: int) -> None:
        """All of a step but its end."""
        await self.trainer.begin(step)
        await self.trainer.prepare(step)
        for mini_batch in range(4):
            await self.trainer.begin_sample(step, mini_batch)
            await self.buffer.take(4, step)
            await self.trainer.end_sample(step, mini_batch)


@asynccontextmanager
async def films() -> AsyncIterator[Films]:
    clock = MonotonicClock(0.3)
    async with (
        world(clock=clock) as w,
        build_buffer(BufferSettings(listen=["127.0.0.1:0"]), clock) as host,
        grpc.aio.insecure_channel(host.target, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        buffer = Caller(channel)
        await buffer.create(train_batch_size=16)
        trainer = await w.trainer(run_config(policy="jit"), buffer_target=host.target)
        buffer.epoch = trainer.epoch
        # Its engine counts what it runs, and tells of none.
        w.engine.present = engine_pb2.ProgressReport(covered_share=0.0)
        w.engine.present.replicas.add(
            replica_id="standalone-0", role=engine_pb2.REPLICA_ROLE_STANDALONE, running=16, decoded_tokens=0
        )
        yield Films(w, buffer, trainer)


async def decision(done: int | None) -> events_pb2.DecisionMade:
    """What is decided at the end of a step when all films of the next have so many frames; None: nobody says."""
    async with asyncio.timeout(30), films() as f:
        batch = await f.begin(*(f"a{number}" for number in range(16)), step=0)
        await f.report(batch, 10)
        assert {request.done for request in (await f.reading(16)).requests} == {10}
        await f.finish(batch)
        await f.reading(0)
        await f.train(1)
        batch = await f.begin(*(f"b{number}" for number in range(16)), step=1)
        if done is not None:
            await f.report(batch, done)
            assert (await f.reading(16)).covered_share == 1.0
        await f.trainer.end(1)
        ends = [
            event.decision_made
            for event in await f.trainer.events()
            if event.HasField("decision_made") and event.decision_made.point == events_pb2.DECISION_POINT_STEP_END
        ]
        return ends[-1]


async def test_a_worker_that_reports_frames_is_decided_on() -> None:
    """Films that are far are worth less of a lend; without the reports they would look as if they had just begun."""
    begun, far = await decision(1), await decision(3900)
    assert (begun.policy, far.policy) == ("jit", "jit")
    assert begun.numbers["covered_share"] == far.numbers["covered_share"] == 1.0
    assert begun.numbers["finished_groups_known"] == 16
    assert begun.action == events_pb2.DECISION_ACTION_LEND
    # 3899 frames, at 10 ms each before any speed was measured, less what the slowest film may still need.
    assert 10 < begun.numbers["wait_alone_seconds"] - far.numbers["wait_alone_seconds"] < 39
    assert begun.numbers["gain_seconds"] > far.numbers["gain_seconds"]


async def test_without_reports_the_same_run_is_blind() -> None:
    """Coverage that counted unseen films as seen would let `jit` predict from nothing."""
    assert (await decision(None)).numbers["covered_share"] == 0.0


def told(turns: Turns, reports: Reports, *requests: engine_pb2.RequestProgress) -> list[int]:
    report = engine_pb2.ProgressReport(requests=requests, covered_share=1.0)
    return [request.done for request in requests_of(report, "train", turns, reports).requests]


def test_what_an_engine_shows_counts_and_not_what_its_worker_says() -> None:
    """Both tell of one trajectory: taken together it would run twice, and a late report would set it back."""
    turns, reports = Turns(), Reports()
    reports.told("g", 0, 400)
    reports.told("g", 1, 30)
    assert told(turns, reports, running("t1", 900)) == [900, 30]
    reports.told("g", 0, 950)
    assert told(turns, reports) == [30], "its request ended: the engine's word still counts"
    reports.settle("g", 1)
    assert told(turns, reports) == []
    reports.told("g", 2, 7)
    reports.forget("g")
    assert told(turns, reports) == []
    assert list(reports) == []


def test_reports_cover_what_engines_do_not_show() -> None:
    """A run of which workers tell everything would fall back to `verl` for ever."""
    report = engine_pb2.ProgressReport(requests=[running("t1", 9)], covered_share=0.25)
    report.replicas.add(replica_id="r", running=3, waiting=1)
    reports = Reports()
    assert requests_of(report, "train", Turns(), reports).covered_share == 0.25
    reports.told("h", 0, 5)
    assert requests_of(report, "train", Turns(), reports).covered_share == 0.5
    for index in range(9):
        reports.told("h", index, 5)
    reading = requests_of(report, "train", Turns(), reports)
    assert reading.covered_share == 1.0
    assert reading.requests[-1] == RunningRequest("h", 8, 5, "", None)
