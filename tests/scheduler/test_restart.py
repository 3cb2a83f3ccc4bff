"""A scheduler that is started again on its directory: everything it answered, promised and learned is there."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.runtime.errors import Code
from services.runtime.host import StartError
from services.runtime.journal import JournalOptions
from services.runtime.journal.database import Database
from services.scheduler import service as service_module
from services.scheduler.domain import events, group_events
from services.scheduler.engine_peer import EnginePeer
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from services.scheduler.storage import policy_image
from tests.scheduler.world import World, error_of, rest_of, run_config, world
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb


def service_of(w: World) -> SchedulerService:
    service = w.host.service
    assert isinstance(service, SchedulerService)
    return service


async def settled(w: World) -> pb.Run:
    """The run once its engines were looked at again."""
    while True:
        run = (await w.stub.GetRun(pb.GetRunRequest(run_id="run"))).run
        if "not confirmed free" not in run.stuck_reason:
            return run
        await asyncio.sleep(0.01)


def without_lease(run: pb.Run) -> pb.Run:
    run.ClearField("lease")
    return run


async def test_a_run_is_after_a_restart_what_it_was_before(tmp_path: Path) -> None:
    """What a trainer was told must still hold, or it trains against another state than the scheduler's."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1, wait=5.0)
        before, told = await trainer.run(), await trainer.events()
        await w.restart()
        assert without_lease(await settled(w)) == without_lease(before)
        assert (await trainer.events())[: len(told)] == told
        assert (await trainer.run()).lease.seconds > 30


async def test_every_answer_is_given_again_after_a_restart(tmp_path: Path) -> None:
    """A reply can get lost in the restart itself; the repeat must not lend, or count, a second time."""
    async with world(data_dir=tmp_path) as w:
        opened = await w.open(request_id="open")
        trainer = await w.trainer(request_id="open")
        await w.restart()
        assert await w.open(request_id="open") == opened
        await w.buffer.set_depth(8)
        began = await trainer.begin(1)
        await w.restart()
        assert await trainer.begin(1) == began
        prepared = await trainer.prepare(1)
        sampled = await trainer.begin_sample(1, 0)
        await w.restart()
        assert await trainer.prepare(1) == prepared
        assert await trainer.begin_sample(1, 0) == sampled
        await trainer.end_sample(1, 0, wait=4.0)
        await w.restart()
        await trainer.end_sample(1, 0, wait=4.0)
        error = await error_of(trainer.end_sample(1, 0, wait=5.0))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "CALL_CHANGED")
        for mini_batch in range(1, 4):
            await trainer.sample(1, mini_batch)
        saved = await trainer.save(1)
        await w.buffer.set_depth(0)
        w.moves()
        ended = await trainer.end(1)
        await w.restart()
        assert await trainer.save(1) == saved
        assert await trainer.end(1) == ended
        completed = await trainer.complete(ended.lend)
        await w.restart()
        assert await trainer.complete(ended.lend) == completed
        assert w.moves() == ["BeginLend", "FinishLend"]
        kinds = [event.WhichOneof("event") for event in await trainer.events()]
        assert kinds.count("step_ended") == kinds.count("step_began") == 1
        assert kinds.count("lend_done") == 2


async def test_an_opening_that_broke_off_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two beginnings of one run in one journal could not be read back."""
    begin_lend, broken = EnginePeer.begin_lend, [RuntimeError("injected")]

    async def breaking(self: EnginePeer, *args: Any, **options: Any) -> tuple[str, ...]:
        if broken:
            raise broken.pop()
        return await begin_lend(self, *args, **options)

    monkeypatch.setattr(EnginePeer, "begin_lend", breaking)
    async with world(data_dir=tmp_path) as w:
        assert (await error_of(w.open())).code is Code.INTERNAL
        assert (await error_of(w.stub.GetRun(pb.GetRunRequest(run_id="run")))).reason == "RUN_NOT_FOUND"
        trainer = await w.trainer()
        told = await trainer.events()
        await w.restart()
        assert (await trainer.events())[: len(told)] == told
        assert told[0].run_opened.epoch == trainer.epoch
        assert (await settled(w)).mode == events_pb2.MODE_ROLLOUT


async def test_closed_runs_stay_closed_and_hold_nothing(tmp_path: Path) -> None:
    """A closed run that came back open would hold GPUs for ever."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.stub.CloseRun(pb.CloseRunRequest(run_id="run", epoch=trainer.epoch, reason="done"))
        await w.restart()
        assert not (await trainer.run()).open
        assert (await error_of(trainer.begin(1))).reason == "RUN_CLOSED"
        assert [e.run_closed.reason for e in await trainer.events() if e.HasField("run_closed")] == ["done"]
        again = await w.trainer(resume=pb.Resume(resume_step=0))
        assert again.epoch == trainer.epoch + 1


async def test_a_run_whose_closing_failed_takes_no_other_call_after_a_restart(tmp_path: Path) -> None:
    """Its trainer is gone; a call that it sent before would be let in, and begin a step that nobody ends."""
    async with world(data_dir=tmp_path, transition_attempts=1) as w:
        trainer = await w.trainer()
        w.engine.stubborn.add("hybrid-0")
        close = pb.CloseRunRequest(run_id="run", epoch=trainer.epoch, reason="done")
        assert (await error_of(w.stub.CloseRun(close))).reason == "RECLAIM_FAILED"
        await w.restart()
        assert (await trainer.run()).open
        assert (await error_of(trainer.begin(1))).reason == "RUN_CLOSED"
        w.engine.stubborn.clear()
        await w.stub.CloseRun(close)
        assert not (await trainer.run()).open
        again = await w.trainer(resume=pb.Resume(resume_step=0))
        await again.begin(1)


async def test_the_trainer_is_not_told_it_has_its_gpus_until_they_were_seen_again(tmp_path: Path) -> None:
    """Engines may have woken while the scheduler was away; what it knew of them before is no confirmation."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        assert (await trainer.run()).mode == events_pb2.MODE_TRAINER
        gate = asyncio.Event()
        for method in ("ListReplicas", "WatchReplicas"):
            w.engine.script.gates[method] = gate
        await w.restart()
        run = await trainer.run()
        assert run.mode == events_pb2.MODE_RECLAIMING
        assert "hybrid-0, hybrid-1" in run.stuck_reason
        gate.set()
        assert (await settled(w)).mode == events_pb2.MODE_TRAINER
        changes = [e.mode_changed.to for e in await trainer.events() if e.HasField("mode_changed")]
        assert changes[-1] == events_pb2.MODE_TRAINER


async def test_a_controller_that_forgot_its_replicas_confirms_nothing(tmp_path: Path) -> None:
    """It was restarted without a journal: engines it does not know of may hold the trainer's memory."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.run_id = "forgotten"
        error = await error_of(trainer.begin(1))
        assert error.reason == "RECLAIM_FAILED"
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        w.engine.run_id = "run"
        assert (await trainer.begin(1)).mode == events_pb2.MODE_TRAINER


def policy_of(w: World) -> Any:
    return service_of(w).registry.get("run").run.learner.policy


@pytest.mark.parametrize("policy", ["verl", "jit", "shadow:jit"])
@pytest.mark.parametrize("compacted", [False, True])
async def test_a_policy_knows_after_a_restart_what_it_knew(tmp_path: Path, policy: str, compacted: bool) -> None:
    """A policy that starts from nothing lends where it had learned not to, for as many steps as it takes to learn."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer(run_config(policy=policy))
        await w.buffer.tell(
            *(buffer_pb2.GroupEvent(kind=buffer_pb2.GROUP_EVENT_KIND_ADDED, group_id=f"g{n}") for n in range(9))
        )
        for step in range(1, 4):
            await w.buffer.set_depth(9)
            await trainer.begin(step)
            await trainer.prepare(step)
            for mini_batch in range(4):
                await w.buffer.set_depth(2)
                await trainer.sample(step, mini_batch, wait=3.0)
                if compacted and step == 2 and mini_batch == 1:
                    keeper = service_of(w).keeper
                    assert keeper is not None
                    await keeper.snapshot()
            await w.buffer.set_depth(1)
            ended = await trainer.end(step)
            if ended.HasField("lend"):
                await trainer.complete(ended.lend)
        seen = len(await trainer.events())
        before = policy_image.write(policy_of(w))
        await w.restart()
        restored = service_of(w).registry.get("run").run
        later = restored.log.read(seen + 1, 1000)
        assert later == []
        assert policy_image.write(policy_of(w)) == before


async def test_a_checkpoint_is_resumed_from_after_a_restart(tmp_path: Path) -> None:
    """Weights are resumed a day later, from a scheduler that was started since."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1, wait=5.0)
        saved = await trainer.save(1)
        at_save = service_of(w).registry.checkpoints.of("run")[saved.checkpoint_id]
        await w.restart()
        kept = service_of(w).registry.checkpoints.of("run")[saved.checkpoint_id]
        assert kept.step == 1
        assert policy_image.write(kept.knowledge) == policy_image.write(at_save.knowledge)
        w.buffer.runs["run"].current_step = 1
        resumed = await w.trainer(resume=pb.Resume(resume_step=1, checkpoint_id=saved.checkpoint_id), take_over=True)
        assert (await resumed.begin(2)).mode == events_pb2.MODE_TRAINER
        unknown = pb.Resume(resume_step=1, checkpoint_id="unknown")
        assert (await error_of(w.open(resume=unknown, take_over=True))).reason == "CHECKPOINT_NOT_FOUND"


async def test_group_events_are_followed_on_without_gap_or_double(tmp_path: Path) -> None:
    """A group counted twice, or never, is one that the policy waits for wrongly."""

    def added(name: str) -> buffer_pb2.GroupEvent:
        return buffer_pb2.GroupEvent(kind=buffer_pb2.GROUP_EVENT_KIND_ADDED, group_id=name, trajectories=1)

    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.tell(added("a"), added("b"))

        async def told(count: int) -> list[str]:
            while True:
                names = [name for event in await trainer.events() for name in event.groups_added.group_ids]
                if len(names) >= count:
                    return names
                await asyncio.sleep(0.01)

        await told(2)
        target = w.host.target
        await w.host.stop()
        await w.buffer.tell(added("c"))
        assert w.start is not None
        w.host = await w.start(target)
        await w.buffer.tell(added("d"))
        assert await told(4) == ["a", "b", "c", "d"]


async def test_a_watch_goes_on_behind_what_it_saw_and_says_what_is_gone(tmp_path: Path) -> None:
    """A report made of events with a silent gap is a wrong report."""
    async with world(data_dir=tmp_path, event_history=1000) as w:
        trainer = await w.trainer()
        run = service_of(w).registry.get("run").run
        moment = service_of(w).registry.get("run").moment
        for step in range(2600):
            run.record(events.ValidationBegan(step), moment)
        first, last = run.log.first, run.log.last
        assert first > 1
        keeper = service_of(w).keeper
        assert keeper is not None
        await keeper.snapshot()
        await w.restart()
        request = pb.WatchRunRequest(run_id="run", from_sequence=first, no_follow=True)
        numbers = [event.sequence async for batch in w.stub.WatchRun(request) for event in batch.events]
        assert numbers[: last - first + 1] == list(range(first, last + 1))
        error = await error_of(trainer.events())
        assert (error.code, error.reason, error.metadata["first"]) == (Code.OUT_OF_RANGE, "EVENTS_TRIMMED", str(first))


async def test_a_failed_commit_takes_back_what_was_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that holds what the disk refused would order engines about on what no restart knows of."""
    broken: list[Exception] = []
    append = Database._append

    def refusing(database: Database, count: int, body: bytes) -> None:
        if broken:
            raise broken[0]
        append(database, count, body)

    monkeypatch.setattr(Database, "_append", refusing)
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        keeper = service_of(w).keeper
        assert keeper is not None
        tell, told = keeper._set_serving, asyncio.Queue[bool]()

        def set_serving(serving: bool) -> None:
            tell(serving)
            told.put_nowait(serving)

        monkeypatch.setattr(keeper, "_set_serving", set_serving)
        watch = w.stub.WatchRun(pb.WatchRunRequest(run_id="run"))
        await watch.initial_metadata()
        await w.buffer.set_depth(8)
        w.moves()
        broken.append(OSError(errno.EIO, "Input/output error"))
        assert (await error_of(trainer.begin(1))).code is Code.UNAVAILABLE
        async with asyncio.timeout(20):
            assert await told.get() is False
        assert (await error_of(rest_of(watch))).code is Code.UNAVAILABLE
        assert w.moves() == [], "engines were ordered about before that was durable"
        broken.clear()
        async with asyncio.timeout(20):
            assert await told.get() is True
        assert (await settled(w)).mode == events_pb2.MODE_ROLLOUT
        assert (await trainer.begin(1)).mode == events_pb2.MODE_TRAINER
        kinds = [event.WhichOneof("event") for event in await trainer.events()]
        assert kinds.count("step_began") == kinds.count("reclaim_done") == 1


async def test_a_snapshot_stands_for_the_records_before_it(tmp_path: Path) -> None:
    """The journal of a run of weeks would be read for minutes at a start, and fill the disk."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        ended = await trainer.step(1, wait=5.0)
        keeper = service_of(w).keeper
        assert keeper is not None
        journal = keeper.journal
        assert journal is not None
        await keeper.snapshot()
        assert journal.snapshot_position == journal.position > 0
        assert journal.stats.log_bytes == 0
        before, told = await trainer.run(), await trainer.events()
        await w.restart()
        assert without_lease(await settled(w)) == without_lease(before)
        assert await trainer.end(1) == ended
        assert await trainer.events() == told
        await w.buffer.set_depth(8)
        await trainer.begin(2)
        await w.restart()
        await trainer.prepare(2)
        assert (await trainer.run()).step == 2


async def test_the_journal_of_a_long_run_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events arrive for weeks; what stands for them on disk must not grow with them."""
    monkeypatch.setattr(service_module, "JournalOptions", partial(JournalOptions, compact_bytes=1 << 14))
    async with world(data_dir=tmp_path, event_history=1000) as w:
        trainer = await w.trainer()
        hosted = service_of(w).registry.get("run")
        keeper = service_of(w).keeper
        assert keeper is not None
        journal = keeper.journal
        assert journal is not None
        largest = 0
        for step in range(12_000):
            hosted.run.record(events.ValidationBegan(step), hosted.moment)
            if step % 20 == 0:
                await hosted.durable()
                largest = max(largest, journal.stats.log_bytes)
        snapshots = journal.snapshot_position
        assert snapshots > 0
        # A snapshot holds up to 1 250 events of some 40 bytes; the log grows to that size before the next one is taken.
        assert largest < 1 << 19
        kept = {placed.sequence: (placed.at, placed.event) for placed in hosted.run.log}
        await w.restart()
        again = {p.sequence: (p.at, p.event) for p in service_of(w).registry.get("run").run.log}
        assert len(kept) >= 1000
        assert {number: again[number] for number in kept} == kept
        await w.buffer.set_depth(8)
        assert (await trainer.begin(1)).mode == events_pb2.MODE_TRAINER


async def test_an_event_costs_the_same_on_disk_however_many_replicas_there_are(tmp_path: Path) -> None:
    """Groups finish by the thousand; with each of them the names of all replicas would be written anew."""
    async with world(hybrids=64, data_dir=tmp_path) as w:
        await w.trainer()
        hosted, keeper = service_of(w).registry.get("run"), service_of(w).keeper
        assert keeper is not None
        journal = keeper.journal
        assert journal is not None
        await hosted.durable()
        before = journal.stats.log_bytes
        for number in range(100):
            hosted.following.next_group_event = number
            hosted.run.record(group_events.GroupLeft(f"g{number}", group_events.GroupExit.COMMITTED), hosted.moment)
            await hosted.durable()
        assert journal.stats.log_bytes - before < 100 * 150
        await w.restart()
        assert len(service_of(w).registry.get("run").run.modes.hybrids) == 64


async def test_two_schedulers_on_one_directory_are_refused(tmp_path: Path) -> None:
    """Two that lend the same GPUs would each be right by its own memory."""
    async with world(data_dir=tmp_path) as w:
        assert w.start is not None
        with pytest.raises(StartError, match="another"):
            await w.start("127.0.0.1:0")
        assert (await w.open()).epoch == 1


async def test_a_damaged_journal_stops_the_start(tmp_path: Path) -> None:
    """A scheduler that began from nothing would open runs whose GPUs are lent."""
    async with world(data_dir=tmp_path) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1)
        await w.host.stop()
        database = tmp_path / "journal" / "journal.db"
        content = bytearray(database.read_bytes())
        at = content.rfind(b"config_json") if b"config_json" in content else len(content) * 3 // 4
        content[at : at + 64] = bytes(64)
        database.write_bytes(bytes(content))
        assert w.start is not None
        with pytest.raises(StartError, match="last good position"):
            await w.start("127.0.0.1:0")
        assert database.read_bytes() == bytes(content), "what is damaged is left for a person to look at"


def test_durability_without_a_directory_is_an_error() -> None:
    """It would promise what nothing keeps."""
    with pytest.raises(ValueError, match="data_dir"):
        SchedulerSettings(durability="fsync")
