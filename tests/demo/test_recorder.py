"""The recorder puts the events of all sources on the job's clock."""

from __future__ import annotations

import io
import json
import time

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from services.demo.assignment import Assignment
from services.demo.events import Event
from services.demo.job import Job
from services.demo.prompts import sample_file
from services.demo.recorder import Recorder, replica_state, translate
from services.demo.report import Reporter
from services.demo.stack import nodes, replicas
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2

SCALE = 0.1


def began(unix: float) -> str:
    """Return the trainer's first line."""
    return json.dumps({"at": 0.0, "event": "job_began", "began_unix_s": unix, "steps": 1})


def timestamp(unix: float) -> Timestamp:
    """Return a wall time as a message."""
    made = Timestamp()
    made.FromNanoseconds(round(unix * 1e9))
    return made


def recorder() -> Recorder:
    """Return a recorder that shows its events to nobody."""
    return Recorder("r", SCALE, [{"replica_id": "hybrid-0", "role": "hybrid"}], lambda _: None)


def test_events_of_the_run_are_placed_by_its_own_clock_after_one_look_at_the_wall_clock() -> None:
    """A step of the wall clock in mid-job must not move a lend to another place in the picture."""
    recording = recorder()
    recording.take_line(began(1000.0))
    lend = events_pb2.LendDone(kind=events_pb2.LEND_KIND_STEP_END, cost_seconds=15.0, lend_id="l")
    # The run's clock stands at 40 when 0.5 wall seconds, 5 domain seconds, of the job have passed.
    recording.take_run_event(events_pb2.RunEvent(sequence=1, at=40.0, time=timestamp(1000.5), lend_done=lend))
    # The wall clock was set an hour back; the run's clock went on by 10.
    reclaim = events_pb2.ReclaimDone(cost_seconds=5.0)
    recording.take_run_event(events_pb2.RunEvent(sequence=2, at=50.0, time=timestamp(-2600.0), reclaim_done=reclaim))
    named = [(event.name, round(event.at, 6)) for event in recording.events]
    assert named == [("job_began", 0.0), ("lend", 5.0), ("reclaim", 15.0)]
    assert recording.events[1].values == {"lend_id": "l", "kind": "step_end", "cost_s": 15.0}


def test_what_replicas_did_before_the_job_began_is_recorded_at_its_beginning() -> None:
    """A row without a first state would begin with a gap."""
    recording = recorder()
    replica = engine_pb2.Replica(spec=engine_pb2.ReplicaSpec(replica_id="hybrid-0"), confirmed_free=True)
    recording.take_replica(replica)
    assert recording.events == []
    recording.take_line(began(time.time()))
    assert recording.events[-1] == Event(0.0, "replica", {"replica_id": "hybrid-0", "state": "asleep"})
    recording.take_replica(replica)
    assert len(recording.events) == 2
    replica.confirmed_free = False
    replica.route = engine_pb2.ROUTE_STATE_SERVING
    recording.take_replica(replica)
    assert recording.events[-1].values == {"replica_id": "hybrid-0", "state": "idle"}
    assert 0 <= recording.events[-1].at < 60 / SCALE


def test_a_replica_decodes_when_the_readings_say_that_requests_run() -> None:
    """The controller tells of changes of state alone; without the readings all replicas would look idle."""
    recording = recorder()
    now = time.time()
    recording.take_line(began(now))
    route = engine_pb2.ROUTE_STATE_SERVING
    recording.take_replica(engine_pb2.Replica(spec=engine_pb2.ReplicaSpec(replica_id="hybrid-0"), route=route))
    reading = events_pb2.ReplicaReading(replica_id="hybrid-0", running=3)
    counters = events_pb2.ReplicaCounters(replicas=[reading])
    recording.take_run_event(
        events_pb2.RunEvent(sequence=1, at=0.0, time=timestamp(now + 1.0), replica_counters=counters)
    )
    last = recording.events[-1]
    assert (round(last.at, 3), last["state"]) == (10.0, "decoding")


@pytest.mark.parametrize(
    ("replica", "running", "state"),
    [
        (engine_pb2.Replica(update_id="u"), 3, "updating"),
        (engine_pb2.Replica(route=engine_pb2.ROUTE_STATE_HELD), 0, "updating"),
        (engine_pb2.Replica(sleep_level=engine_pb2.SLEEP_LEVEL_TWO), 2, "asleep"),
        (engine_pb2.Replica(confirmed_free=True), 0, "asleep"),
        (engine_pb2.Replica(route=engine_pb2.ROUTE_STATE_SERVING), 1, "decoding"),
        (engine_pb2.Replica(route=engine_pb2.ROUTE_STATE_SERVING), 0, "idle"),
        (engine_pb2.Replica(paused=True), 1, "idle"),
    ],
)
def test_a_replica_has_one_state_at_a_time(replica: engine_pb2.Replica, running: int, state: str) -> None:
    """The colours of the picture."""
    assert replica_state(replica, running) == state


def test_groups_that_left_are_told_with_their_reasons() -> None:
    """Without the eviction an outsider would count the group as lost."""
    recording = recorder()
    recording.take_line(began(1000.0))
    left = events_pb2.GroupLeft(
        group_id="g",
        how=buffer_pb2.GROUP_EVENT_KIND_EVICTED,
        reasons=[buffer_pb2.EVICTION_REASON_STALE, buffer_pb2.EVICTION_REASON_ZERO_VARIANCE],
    )
    recording.take_run_event(events_pb2.RunEvent(sequence=1, at=0, time=timestamp(1000.0), group_left=left))
    values = {"group_id": "g", "how": "evicted", "reasons": ["stale", "zero_variance"]}
    assert recording.events[-1].values == values


def test_a_report_has_the_jobs_time_and_each_state_once() -> None:
    """The trainer's lines are the base of idle share and wall clock."""
    now = [5.0]
    out = io.StringIO()
    reporter = Reporter(SCALE, out=out, monotonic=lambda: now[0])
    reporter.begin(steps=1)
    now[0] += 2.0
    reporter.state("training", 1)
    reporter.state("training", 1)
    reporter.tell("step_ended", step=1)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["event"], line["at"]) for line in lines] == [
        ("job_began", 0.0),
        ("trainer", 20.0),
        ("step_ended", 20.0),
    ]


def test_an_assignment_survives_its_argument() -> None:
    """Every process of a job must be told the same."""
    assignment = Assignment(Job(seed=3, switching=True, steps=2), sample_file(), "b", "e", "s", "w")
    assert Assignment.from_json(assignment.to_json()) == assignment


def test_the_job_has_two_standalone_and_four_hybrid_replicas_on_three_nodes() -> None:
    """The published setting."""
    job = Job()
    assert [replica["role"] for replica in replicas(job)] == ["standalone"] * 2 + ["hybrid"] * 4
    assert len({replica["replica_id"] for replica in replicas(job)}) == 6
    assert [node.name for node in nodes(job)] == ["standalone-node-0", "hybrid-node-0", "hybrid-node-1"]
    assert (job.standalone_gpus, job.hybrid_gpus, job.batch_size) == (8, 16, 64)


def test_what_a_lend_brought_is_told() -> None:
    """Whether lending paid is what the file is read for; no prediction is no gain of 0 s."""
    brought = events_pb2.LendGoodput(lend_id="l", decoded_tokens=9, delivered_tokens=7, lost_seconds=3.5)
    told = translate(events_pb2.RunEvent(lend_goodput=brought))
    values = {"lend_id": "l", "decoded_tokens": 9, "delivered_tokens": 7, "lost_s": 3.5, "gained_s": None}
    assert told == ("lend_brought", values)
    brought.gained_seconds = -2.0
    again = translate(events_pb2.RunEvent(lend_goodput=brought))
    assert again == ("lend_brought", values | {"gained_s": -2.0})
