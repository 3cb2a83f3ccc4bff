"""Cases H50, H57 and H60 for a scheduler with a data directory."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from services.scheduler.observer import Observer
from services.scheduler.service import SchedulerService
from services.scheduler.storage.keeper import Keeper
from tests.scheduler.world import World, error_of, rest_of, world
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncSchedulerClient, ClientOptions, RetryPolicy
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb


async def until_waiting(w: World, count: int) -> None:
    """Return once the buffer was asked to wait so many times."""
    async with asyncio.timeout(20):
        while len(w.buffer.waits) < count:  # noqa: ASYNC110 - the fake tells nobody
            await asyncio.sleep(0.01)


async def test_h50_sigterm_ends_waits_and_watches_and_keeps_the_lend(tmp_path: Path) -> None:
    """A stop while the GPUs are lent: nobody hangs, nothing is taken back, and the next scheduler has it all."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(2)
        await trainer.begin(1)
        wait = trainer.prepare_stream(1)
        await wait.read()
        watch = w.stub.WatchRun(pb.WatchRunRequest(run_id="run"))
        await watch.initial_metadata()
        w.moves()
        target = w.host.target
        assert await w.host.stop(5)
        for stream in (wait, watch):
            assert (await error_of(rest_of(stream))).reason in ("DRAINING", "UNAVAILABLE")
        assert w.moves() == []
        assert w.start is not None
        w.host = await w.start(target)
        assert (await trainer.run()).mode == events_pb2.MODE_ROLLOUT
        await w.buffer.set_depth(8)
        assert (await trainer.prepare(1)).mode == events_pb2.MODE_TRAINER
        assert w.moves() == ["Reclaim"]


async def test_h57_a_parked_wait_is_armed_again_once_and_the_restart_is_visible(tmp_path: Path) -> None:
    """The trainer calls one function and waits; a restart of the scheduler below it must not be its concern."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(2)
        await trainer.begin(1)
        options = ClientOptions(retry=RetryPolicy(initial=0.02, maximum=0.2))
        client = AsyncSchedulerClient(w.host.target, options)
        request = pb.PrepareStepRequest(run_id="run", epoch=trainer.epoch, step=1)
        waiting = asyncio.ensure_future(client.prepare_step(request))
        await until_waiting(w, 1)
        before = await client.incarnation("run")
        await w.restart()
        await until_waiting(w, 2)
        assert await client.incarnation("run") != before
        w.moves()
        await w.buffer.set_depth(8)
        async with asyncio.timeout(5):
            done = await waiting
        assert (done.outcome, done.mode) == (buffer_pb2.WAIT_OUTCOME_REACHED, events_pb2.MODE_TRAINER)
        assert w.moves() == ["Reclaim"]
        assert len(w.buffer.waits) == 2
        await client.close()


async def test_h60_following_survives_exceptions_and_a_merciless_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its observer a run goes on, and its policy decides on groups that it never hears of again."""
    failures = {"_group": 1, "_saw": 1}

    def failing(name: str) -> None:
        original = getattr(Observer, name)

        def hooked(self: Observer, *args: object) -> None:
            if failures[name]:
                failures[name] -= 1
                raise RuntimeError("injected")
            original(self, *args)

        monkeypatch.setattr(Observer, name, hooked)

    failing("_group")
    failing("_saw")
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        async with world(data_dir=tmp_path) as w:
            trainer = await w.trainer()
            added = buffer_pb2.GROUP_EVENT_KIND_ADDED
            await w.buffer.tell(buffer_pb2.GroupEvent(kind=added, group_id="a", trajectories=1))
            async with asyncio.timeout(20):
                while True:
                    gc.collect()
                    kinds = {event.WhichOneof("event") for event in await trainer.events()}
                    if {"groups_added", "topology_changed"} <= kinds:
                        break
                    await asyncio.sleep(0.02)
            assert failures == {"_group": 0, "_saw": 0}
            assert all(loop.running and not loop.restarts for loop in w.host.context.tasks.status())
    finally:
        gc.set_threshold(*thresholds)


async def test_h60_a_snapshot_that_fails_is_logged_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction that died in silence would let the journal grow until the disk is full."""
    calls = 0
    snapshot = Keeper.snapshot

    async def fails_once(self: Keeper) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("injected")
        await snapshot(self)

    monkeypatch.setattr(Keeper, "snapshot", fails_once)
    monkeypatch.setattr(Keeper, "_log_is_long", lambda _: True)
    async with world(data_dir=tmp_path) as w:
        await w.trainer()
        service = w.host.service
        assert isinstance(service, SchedulerService)
        assert service.keeper is not None
        service.keeper.compaction_due.set()
        status = {loop.name: loop for loop in w.host.context.tasks.status()}["scheduler compaction"]
        async with asyncio.timeout(20):
            # The supervisor pauses for a second before it starts the loop again; nothing announces that.
            while status.restarts == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "injected" in status.last_error
            service.keeper.compaction_due.set()
            while service.keeper.journal is None or not service.keeper.journal.snapshot_position:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_no_snapshot_is_taken_of_a_log_that_is_short_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All through a snapshot the log is as long as before it, so each was followed at once by a second one."""
    taken: list[Keeper] = []

    async def snapshot(self: Keeper) -> None:
        taken.append(self)

    monkeypatch.setattr(Keeper, "snapshot", snapshot)
    async with world(data_dir=tmp_path) as w:
        await w.trainer()
        service = w.host.service
        assert isinstance(service, SchedulerService)
        assert service.keeper is not None
        assert service.keeper.journal is not None
        assert not service.keeper.journal.compaction_due
        service.keeper.compaction_due.set()
        async with asyncio.timeout(20):
            # A snapshot begins in the turn in which that is taken up.
            while service.keeper.compaction_due.is_set():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        assert not taken
