"""The event stream of a run, and the metrics that are counted from it."""

import asyncio
import json
import urllib.request
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest

from services.runtime.errors import Code, out_of_range, unimplemented
from tests.scheduler.fakes import FakeEngine, host_buffer, host_engine
from tests.scheduler.world import RUN, Trainer, World, error_of, rest_of, run_config, world
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

Kind = buffer_pb2.GroupEventKind


async def until(trainer: Trainer, kind: str, count: int = 1) -> list[events_pb2.RunEvent]:
    """All events once there are `count` of a kind; read from the stream, so that nothing is polled."""
    seen: list[events_pb2.RunEvent] = []
    stream = trainer.stub.WatchRun(pb.WatchRunRequest(run_id=RUN, from_sequence=1))
    async for batch in stream:
        seen += batch.events
        if sum(event.WhichOneof("event") == kind for event in seen) >= count:
            break
    stream.cancel()
    return seen


async def ready(w: World) -> None:
    """Until the scheduler follows buffer and engine."""
    await w.buffer.script.arrived["WatchGroups"].wait()
    await w.engine.script.arrived["WatchReplicas"].wait()


async def test_watching_replays_from_a_number_and_then_follows() -> None:
    """A report that attaches late must see the same run as one that was there from the start."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        everything = await trainer.events()
        assert [event.sequence for event in everything] == list(range(1, len(everything) + 1))
        assert all(earlier.at <= later.at for earlier, later in pairwise(everything))
        assert everything[0].run_opened.epoch == 1
        assert json.loads(everything[0].run_opened.config_json)["train_batch_size"] == 16
        stream = w.stub.WatchRun(pb.WatchRunRequest(run_id=RUN, from_sequence=3))
        first: Any = await stream.read()
        assert first.events[0] == everything[2]
        seen: list[events_pb2.RunEvent] = list(first.events)
        await trainer.begin(2)
        while not any(event.step_began.step == 2 for event in seen):
            batch: Any = await stream.read()
            seen += batch.events
        stream.cancel()
        assert [event.sequence for event in seen] == list(range(3, 3 + len(seen)))


async def test_without_a_number_only_news_are_told() -> None:
    """A live view has no use for the past."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        last = (await trainer.run()).last_sequence
        assert last > 0
        stream = w.stub.WatchRun(pb.WatchRunRequest(run_id=RUN))
        await stream.wait_for_connection()
        await trainer.begin(1)
        news: Any = await stream.read()
        # A reading may come between the two calls.
        assert news.events[0].sequence > last
        stream.cancel()


async def test_trimmed_events_are_an_error_that_names_the_first_kept() -> None:
    """A silent gap would make every sum of the report wrong."""
    async with world(event_history=1000) as w:
        trainer = await w.trainer()
        await ready(w)
        added = [
            buffer_pb2.GroupEvent(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id=f"g{n}", born_step=n, trajectories=1)
            for n in range(1500)
        ]
        await w.buffer.tell(*added)
        news: Any = w.stub.WatchRun(pb.WatchRunRequest(run_id=RUN))
        while (await trainer.run()).last_sequence < 1500:
            await news.read()
        news.cancel()
        error = await error_of(trainer.events())
        assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "EVENTS_TRIMMED")
        assert int(error.metadata["first"]) > 1


async def test_the_life_of_groups_is_told_with_pool_and_reasons() -> None:
    """Predictions rest on lengths by pool, reports on why groups were lost."""
    async with world() as w:
        trainer = await w.trainer()
        await ready(w)
        await until(trainer, "topology_changed")
        event = buffer_pb2.GroupEvent
        await w.buffer.tell(
            event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="a", born_step=1, trajectories=2),
            event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="b", born_step=1, trajectories=2),
            event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="c", born_step=2, trajectories=3),
            event(kind=Kind.GROUP_EVENT_KIND_STARTED, group_id="a", trajectories=2),
            event(
                kind=Kind.GROUP_EVENT_KIND_TRAJECTORY_FINISHED,
                group_id="a",
                index=1,
                lengths=[70],
                replica_id="hybrid-0",
            ),
            event(kind=Kind.GROUP_EVENT_KIND_FINISHED, group_id="a", born_step=1, lengths=[50, 70]),
            event(kind=Kind.GROUP_EVENT_KIND_REISSUED, group_id="b", trajectories=1),
            event(kind=Kind.GROUP_EVENT_KIND_FAILED, group_id="b"),
            event(
                kind=Kind.GROUP_EVENT_KIND_EVICTED,
                group_id="b",
                reasons=[buffer_pb2.EVICTION_REASON_FAILED, buffer_pb2.EVICTION_REASON_STALE],
            ),
            event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="v", partition="val", trajectories=1),
            event(kind=Kind.GROUP_EVENT_KIND_COMMITTED, group_id="a"),
        )
        seen = await until(trainer, "group_left", 3)
        added = [e.groups_added for e in seen if e.HasField("groups_added")]
        assert [(list(a.group_ids), a.born_step, list(a.group_sizes)) for a in added] == [
            (["a", "b"], 1, [2, 2]),
            (["c"], 2, [3]),
        ]
        (finished,) = [e.trajectory_finished for e in seen if e.HasField("trajectory_finished")]
        assert (finished.group_id, finished.index, finished.length, finished.replica_id) == ("a", 1, 70, "hybrid-0")
        (complete,) = [e.group_finished for e in seen if e.HasField("group_finished")]
        assert (list(complete.lengths), complete.on_hybrid) == ([50, 70], True)
        (reissued,) = [e.trajectories_reissued for e in seen if e.HasField("trajectories_reissued")]
        assert reissued.trajectories == 1
        left = [e.group_left for e in seen if e.HasField("group_left")]
        assert [(e.group_id, e.how) for e in left] == [
            ("b", Kind.GROUP_EVENT_KIND_FAILED),
            ("b", Kind.GROUP_EVENT_KIND_EVICTED),
            ("a", Kind.GROUP_EVENT_KIND_COMMITTED),
        ]
        assert list(left[1].reasons) == [buffer_pb2.EVICTION_REASON_FAILED, buffer_pb2.EVICTION_REASON_STALE]


async def test_a_broken_stream_of_groups_is_taken_up_where_it_broke() -> None:
    """A restart of the buffer must not lose or repeat a group in the report."""
    async with world() as w:
        trainer = await w.trainer()
        await ready(w)
        event = buffer_pb2.GroupEvent
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="a", trajectories=1))
        await until(trainer, "groups_added")
        target = w.buffer_host.target
        await w.buffer_host.stop(0)
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="b", trajectories=1))
        async with host_buffer(w.buffer, listen=target):
            seen = await until(trainer, "groups_added", 2)
        assert [list(e.groups_added.group_ids) for e in seen if e.HasField("groups_added")] == [["a"], ["b"]]


async def test_progress_and_counters_are_told_with_pool_and_route() -> None:
    """Policies that predict need tokens so far and speed by pool."""
    async with world() as w:
        trainer = await w.trainer()
        await ready(w)
        await until(trainer, "topology_changed")
        hybrid = engine_pb2.REPLICA_ROLE_HYBRID
        report = engine_pb2.ProgressReport(covered_share=0.97)
        key = engine_pb2.JoinKey(partition="train", group_id="a", trajectory=1)
        report.requests.add(join_key=key, replica_id="hybrid-0", role=hybrid, output_tokens=42)
        report.requests.add(join_key=key, output_tokens=7)
        report.requests.add(join_key=engine_pb2.JoinKey(partition="val", group_id="v"), output_tokens=7)
        report.replicas.add(replica_id="hybrid-0", role=hybrid, decoded_tokens=900, running=2)
        report.replicas.add(replica_id="gone", decoded_tokens=1)
        w.engine.progress.append(report)
        await w.engine.wake()
        seen = await until(trainer, "replica_counters")
        (progress,) = [e.request_progress for e in seen if e.HasField("request_progress")]
        assert progress.covered_share == 0.97
        assert [(r.done, r.replica_id, r.on_hybrid, r.HasField("on_hybrid")) for r in progress.requests] == [
            (42, "hybrid-0", True, True),
            (7, "", False, False),
        ]
        (counters,) = [e.replica_counters for e in seen if e.HasField("replica_counters")]
        assert [(r.replica_id, r.hybrid, r.route) for r in counters.replicas] == [
            ("hybrid-0", True, engine_pb2.ROUTE_STATE_SERVING),
            ("gone", False, engine_pb2.ROUTE_STATE_OUT),
        ]


async def test_topology_tells_healthy_replicas_and_their_gpus() -> None:
    """A policy that counts a dead replica expects a speed that is not there."""
    async with world() as w:
        trainer = await w.trainer()
        seen = await until(trainer, "topology_changed")
        first = next(e.topology_changed for e in seen if e.HasField("topology_changed"))
        assert (first.hybrid_replicas, first.standalone_replicas) == (2, 1)
        assert (first.hybrid_gpus, first.standalone_gpus) == (2, 1)
        w.engine.replicas["hybrid-1"].health = engine_pb2.REPLICA_HEALTH_DEAD
        await w.engine.wake()
        await until(trainer, "topology_changed", 2)
        del w.engine.replicas["standalone-0"]
        await w.engine.wake()
        seen = await until(trainer, "topology_changed", 3)
        last = [e.topology_changed for e in seen if e.HasField("topology_changed")][-1]
        assert (last.hybrid_replicas, last.standalone_replicas) == (1, 0)


async def test_a_decision_is_told_with_every_number_it_rests_on() -> None:
    """`turnout explain` has nothing else to explain from."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1)
        made = [e.decision_made for e in await trainer.events() if e.HasField("decision_made")]
        points = [decision.point for decision in made]
        assert points == [
            events_pb2.DECISION_POINT_STEP_BEGIN,
            *[events_pb2.DECISION_POINT_SAMPLE_BEGIN] * 4,
            events_pb2.DECISION_POINT_STEP_END,
        ]
        last = made[-1]
        assert last.policy == "verl"
        assert last.reason
        assert last.threshold == 8
        for number in ("sampleable_count", "remaining", "threshold_ratio", "wait_seconds", "idle", "scaling_factor"):
            assert number in last.numbers
        metrics = [e.step_metrics for e in await trainer.events() if e.HasField("step_metrics")]
        assert metrics[0].metrics["separate_async/decision/remaining"] == 0


async def test_the_stream_ends_when_the_run_is_closed() -> None:
    """A report that follows a finished job would otherwise never be written."""
    async with world() as w:
        trainer = await w.trainer()
        stream = w.stub.WatchRun(pb.WatchRunRequest(run_id=RUN, from_sequence=1))
        await stream.read()
        await w.stub.CloseRun(pb.CloseRunRequest(run_id=RUN, epoch=trainer.epoch, reason="done"))
        seen: list[events_pb2.RunEvent] = [event for batch in await rest_of(stream) for event in batch.events]
        assert [event.run_closed.reason for event in seen if event.HasField("run_closed")] == ["done"]


async def test_draining_ends_watches() -> None:
    """A live view must not keep the service from stopping."""
    async with world() as w:
        await w.trainer()
        stream = w.stub.WatchRun(pb.WatchRunRequest(run_id=RUN, from_sequence=1))
        await stream.read()
        stopping = asyncio.ensure_future(w.host.stop())
        assert (await error_of(rest_of(stream))).reason == "DRAINING"
        assert await stopping


async def test_metrics_are_counted_from_the_events() -> None:
    """A dashboard and `turnout top` must never disagree."""
    async with world(metrics_listen="127.0.0.1:0") as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1, wait=3.0)
        assert w.host.metrics_url is not None
        with await asyncio.to_thread(urllib.request.urlopen, w.host.metrics_url) as answer:
            text = answer.read().decode()
        for line in (
            'turnout_run_mode{mode="trainer",run_id="run"} 1.0',
            'turnout_run_mode{mode="rollout",run_id="run"} 0.0',
            'turnout_lends_total{kind="init",run_id="run"} 1.0',
            'turnout_reclaim_seconds_count{run_id="run"} 1.0',
            'turnout_sample_wait_seconds_sum{run_id="run"} 3.0',
            'turnout_decisions_total{action="reclaim",point="step_begin",run_id="run"} 1.0',
        ):
            assert line in text


async def test_what_a_lend_brought_is_told_and_counted() -> None:
    """Whether lending paid is the one question that the owner of the GPUs asks."""
    async with world(metrics_listen="127.0.0.1:0") as w:
        trainer = await w.trainer()
        await ready(w)
        await until(trainer, "topology_changed")
        for hybrid, standalone in ((0, 0), (900, 300)):
            report = engine_pb2.ProgressReport(covered_share=1.0)
            for name, role, decoded in (
                ("hybrid-0", engine_pb2.REPLICA_ROLE_HYBRID, hybrid),
                ("standalone-0", engine_pb2.REPLICA_ROLE_STANDALONE, standalone),
            ):
                report.replicas.add(replica_id=name, role=role, decoded_tokens=decoded, running=1)
            w.engine.progress.append(report)
        await w.engine.wake()
        await until(trainer, "replica_counters", 2)
        finished = buffer_pb2.GroupEvent(
            kind=Kind.GROUP_EVENT_KIND_TRAJECTORY_FINISHED, group_id="a", lengths=[70], replica_id="hybrid-0"
        )
        await w.buffer.tell(finished)
        await until(trainer, "trajectory_finished")
        await w.buffer.set_depth(8)
        await trainer.step(1, wait=3.0)
        (told,) = [e.lend_goodput for e in await trainer.events() if e.HasField("lend_goodput")]
        assert (told.decoded_tokens, told.delivered_tokens) == (900, 70)
        assert told.lost_seconds >= told.switch_seconds + 3.0 > 3.0
        assert told.HasField("saved_at_most_seconds")
        assert not told.HasField("gained_seconds")
        assert w.host.metrics_url is not None
        with await asyncio.to_thread(urllib.request.urlopen, w.host.metrics_url) as answer:
            text = answer.read().decode()
        assert 'turnout_lent_tokens_total{run_id="run",what="decoded"} 900.0' in text
        assert 'turnout_lent_tokens_total{run_id="run",what="delivered"} 70.0' in text


async def test_many_runs_live_side_by_side() -> None:
    """One scheduler serves a team; a step of one run must not move another's GPUs."""
    async with world() as w, AsyncExitStack() as stack:
        trainers = []
        for number in range(4):
            name = f"job-{number}"
            w.buffer.add_run(name)
            engine = FakeEngine(w.journal, name)  # type: ignore[abstract]
            engine.add("hybrid", gpu=f"gpu-{number}")
            host = await stack.enter_async_context(host_engine(engine))
            trainers.append(await w.trainer(run_id=name, engine_target=host.target))
        await w.buffer.set_depth(8)
        await asyncio.gather(*(trainer.step(1) for trainer in trainers[:3]))
        runs = (await w.stub.ListRuns(pb.ListRunsRequest())).runs
        assert [(run.run_id, run.step) for run in runs] == [("job-0", 1), ("job-1", 1), ("job-2", 1), ("job-3", 0)]
        assert runs[3].mode == events_pb2.MODE_ROLLOUT


async def test_groups_that_are_added_before_the_stream_is_up_are_told_all_the_same() -> None:
    """A trainer adds its warm-up as soon as it may; a report that misses it would find groups that nobody added."""
    async with world() as w:
        event = buffer_pb2.GroupEvent
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="before", trajectories=1))
        gate = w.buffer.script.gates["WatchGroups"] = asyncio.Event()
        trainer = await w.trainer()
        await w.buffer.script.arrived["WatchGroups"].wait()
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="warm-up", trajectories=1))
        gate.set()
        seen = await until(trainer, "groups_added")
        assert [list(e.groups_added.group_ids) for e in seen if e.HasField("groups_added")] == [["warm-up"]]


async def test_a_take_over_follows_the_groups_where_its_predecessor_stopped() -> None:
    """Groups that finish between two trainers of a run belong to its report, once."""
    async with world() as w:
        trainer = await w.trainer()
        await ready(w)
        event = buffer_pb2.GroupEvent
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="a", trajectories=1))
        await until(trainer, "groups_added")
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        opening = asyncio.ensure_future(w.open(take_over=True, resume=pb.Resume(keep_live=True)))
        await w.engine.script.arrived["Reclaim"].wait()
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="b", trajectories=1))
        gate.set()
        await opening
        seen = await until(trainer, "groups_added", 2)
        assert [list(e.groups_added.group_ids) for e in seen if e.HasField("groups_added")] == [["a"], ["b"]]


@pytest.mark.parametrize("reason", ["EVENTS_TRIMMED", "EVENTS_AHEAD"])
async def test_a_buffer_that_lost_its_events_is_followed_from_now_on(reason: str) -> None:
    """What is lost is lost; following nothing at all would be worse."""
    async with world() as w:
        trainer = await w.trainer()
        await ready(w)
        event = buffer_pb2.GroupEvent
        await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="a", trajectories=1))
        await until(trainer, "groups_added")
        w.buffer.script.failures["WatchGroups"].append(out_of_range(reason, "no such number"))
        w.buffer.script.arrived["WatchGroups"].clear()
        target = w.buffer_host.target
        await w.buffer_host.stop(0)
        if reason == "EVENTS_AHEAD":
            w.buffer.group_events.clear()
        async with host_buffer(w.buffer, listen=target):
            await w.buffer.script.arrived["WatchGroups"].wait()
            w.buffer.script.arrived["WatchGroups"].clear()
            await w.buffer.script.arrived["WatchGroups"].wait()
            await w.buffer.tell(event(kind=Kind.GROUP_EVENT_KIND_ADDED, group_id="b", trajectories=1))
            seen = await until(trainer, "groups_added", 2)
        assert [list(e.groups_added.group_ids) for e in seen if e.HasField("groups_added")] == [["a"], ["b"]]


async def test_a_controller_without_progress_is_not_asked_again() -> None:
    """In control-plane mode there may be none; asking twice a second for ever would be noise."""
    async with world() as w:
        w.engine.script.failures["WatchProgress"] = [unimplemented("WatchProgress")]
        await w.trainer()
        await w.engine.script.arrived["WatchProgress"].wait()
        await asyncio.sleep(0.7)
        assert w.journal.count("WatchProgress") == 1
