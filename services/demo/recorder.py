"""Collects the events of one job from where they happen: the trainer's process, the run's events, the replicas.

Invariants: all times are on the job's clock, which the trainer starts; each source has its own monotonic clock and is
tied to the job's by one reading of the wall clock, so a step of the wall clock in mid-job moves nothing; a replica's
state is recorded when it changes and at the job's beginning.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

from services.demo.events import Event, in_order
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncEngineClient, AsyncSchedulerClient
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2

OnEvent = Callable[[Event], None]

_HOW: Final = {
    buffer_pb2.GROUP_EVENT_KIND_FAILED: "failed",
    buffer_pb2.GROUP_EVENT_KIND_EVICTED: "evicted",
    buffer_pb2.GROUP_EVENT_KIND_SAMPLED: "sampled",
    buffer_pb2.GROUP_EVENT_KIND_RETURNED: "returned",
    buffer_pb2.GROUP_EVENT_KIND_COMMITTED: "committed",
}
_LEND_KINDS: Final = {
    events_pb2.LEND_KIND_INIT: "init",
    events_pb2.LEND_KIND_STEP_END: "step_end",
    events_pb2.LEND_KIND_WITHIN_STEP: "within_step",
    events_pb2.LEND_KIND_VALIDATION: "validation",
}


def word(name: str, prefix: str) -> str:
    """Return the word of an enum value: `MODE_TRAINER` without `MODE_`, in small letters."""
    return name.removeprefix(prefix).lower()


def replica_state(replica: engine_pb2.Replica, running: int) -> str:
    """Return what a replica with so many running requests does, in one word of the event file."""
    moving = replica.update_id or replica.route == engine_pb2.ROUTE_STATE_HELD
    if moving:
        return "updating"
    if replica.confirmed_free or replica.sleep_level != engine_pb2.SLEEP_LEVEL_UNSPECIFIED:
        return "asleep"
    if running and not replica.paused:
        return "decoding"
    return "idle"


class Recorder:
    """The events of one job."""

    def __init__(self, run_id: str, time_scale: float, replicas: list[dict[str, str]], on_event: OnEvent) -> None:
        self._run_id = run_id
        self._scale = time_scale
        self._replicas = replicas
        self._on_event = on_event
        self._events: list[Event] = []
        self._known: dict[str, engine_pb2.Replica] = {}
        self._running: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._began = asyncio.Event()
        self._began_unix: float | None = None
        self._began_monotonic = 0.0
        self._run_offset: float | None = None
        self._next_sequence = 1
        self.run_events: list[events_pb2.RunEvent] = []
        """The run's own events, as the scheduler told them."""

    @property
    def events(self) -> list[Event]:
        """Everything recorded, in order of time."""
        return in_order(self._events)

    def take_line(self, line: str) -> None:
        """Take in a line of the trainer's report."""
        values = json.loads(line)
        at, name = float(values.pop("at")), str(values.pop("event"))
        if name == "job_began":
            self._began_unix = values.pop("began_unix_s")
            self._began_monotonic = time.monotonic() - (time.time() - self._began_unix)
            values["replicas"] = self._replicas
            self._record(Event(at, name, values))
            for replica_id, state in self._states.items():
                self._record(Event(at, "replica", {"replica_id": replica_id, "state": state}))
            self._began.set()
            return
        self._record(Event(at, name, values))

    def take_replica(self, replica: engine_pb2.Replica) -> None:
        """Take in the present state of a replica."""
        self._known[replica.spec.replica_id] = replica
        at = (time.monotonic() - self._began_monotonic) / self._scale if self._began.is_set() else 0.0
        self._look_at(replica.spec.replica_id, at)

    def take_run_event(self, event: events_pb2.RunEvent) -> None:
        """Take in an event of the run; those that are no part of the event file are left out."""
        self._next_sequence = event.sequence + 1
        self.run_events.append(event)
        if event.HasField("replica_counters"):
            # The controller tells of a replica when its state changes; how much it has to do is told in these readings.
            for reading in event.replica_counters.replicas:
                self._running[reading.replica_id] = reading.running
                self._look_at(reading.replica_id, self._run_time(event))
        if (made := translate(event)) is not None:
            name, values = made
            self._record(Event(max(self._run_time(event), 0.0), name, values))

    async def follow_replicas(self, client: AsyncEngineClient) -> None:
        """Record what the replicas do, until cancelled."""
        request = engine_pb2.WatchReplicasRequest(run_id=self._run_id)
        async with aclosing(client.watch_replicas(request)) as messages:
            async for message in messages:
                for replica in message.changed:
                    self.take_replica(replica)

    async def follow_run(self, client: AsyncSchedulerClient, *, to_the_end: bool = False) -> None:
        """Record the run's events, until cancelled or, with `to_the_end`, until none is left."""
        request = scheduler_pb2.WatchRunRequest(
            run_id=self._run_id, from_sequence=self._next_sequence, no_follow=to_the_end
        )
        async with aclosing(client.watch_run(request)) as events:
            async for event in events:
                self.take_run_event(event)

    async def until_began(self) -> None:
        """Return once the trainer has started the job's clock."""
        await self._began.wait()

    def record_now(self, name: str, values: dict[str, Any]) -> None:
        """Record something that is so from now on; from its beginning, if the job has not begun."""
        at = (time.monotonic() - self._began_monotonic) / self._scale if self._began.is_set() else 0.0
        self._record(Event(at, name, values))

    def _look_at(self, replica_id: str, at: float) -> None:
        replica = self._known.get(replica_id)
        if replica is None:
            return
        state = replica_state(replica, self._running.get(replica_id, 0))
        if self._states.get(replica_id) == state:
            return
        self._states[replica_id] = state
        if self._began.is_set():
            self._record(Event(max(at, 0.0), "replica", {"replica_id": replica_id, "state": state}))

    def _run_time(self, event: events_pb2.RunEvent) -> float:
        if self._run_offset is None:
            assert self._began_unix is not None
            unix = event.time.seconds + event.time.nanos / 1e9
            self._run_offset = (unix - self._began_unix) / self._scale - event.at
        return self._run_offset + event.at

    def _record(self, event: Event) -> None:
        self._events.append(event)
        self._on_event(event)


def translate(event: events_pb2.RunEvent) -> tuple[str, dict[str, Any]] | None:
    """Return name and values of a run's event in the event file, or None if it is not in there."""
    kind = event.WhichOneof("event")
    match kind:
        case "trajectory_finished":
            done = event.trajectory_finished
            values = {"group_id": done.group_id, "index": done.index, "tokens": done.length}
            return kind, values | {"replica_id": done.replica_id}
        case "group_finished":
            group = event.group_finished
            on_hybrid = group.on_hybrid if group.HasField("on_hybrid") else None
            return kind, {"group_id": group.group_id, "tokens": list(group.lengths), "on_hybrid": on_hybrid}
        case "group_left":
            left = event.group_left
            reasons = [word(buffer_pb2.EvictionReason.Name(r), "EVICTION_REASON_") for r in left.reasons]
            return kind, {"group_id": left.group_id, "how": _HOW.get(left.how, "unknown"), "reasons": reasons}
        case "mode_changed":
            # `from` is a keyword, so the field has to be asked for by name.
            before, after = getattr(event.mode_changed, "from"), event.mode_changed.to
            names = {"from": events_pb2.Mode.Name(before), "to": events_pb2.Mode.Name(after)}
            return "mode", {key: word(name, "MODE_") for key, name in names.items()}
        case "decision_made":
            made = event.decision_made
            return "decision", {
                "point": word(events_pb2.DecisionPoint.Name(made.point), "DECISION_POINT_"),
                "step": made.step,
                "action": word(events_pb2.DecisionAction.Name(made.action), "DECISION_ACTION_"),
                "policy": made.policy,
                "reason": made.reason,
                "numbers": dict(made.numbers),
            }
        case "lend_done":
            lend = event.lend_done
            kind_word = _LEND_KINDS.get(lend.kind, "unknown")
            return "lend", {"lend_id": lend.lend_id, "kind": kind_word, "cost_s": lend.cost_seconds}
        case "lend_goodput":
            brought = event.lend_goodput
            gained = brought.gained_seconds if brought.HasField("gained_seconds") else None
            tokens = {"decoded_tokens": brought.decoded_tokens, "delivered_tokens": brought.delivered_tokens}
            return "lend_brought", {
                "lend_id": brought.lend_id,
                **tokens,
                "lost_s": brought.lost_seconds,
                "gained_s": gained,
            }
        case "reclaim_done":
            return "reclaim", {"cost_s": event.reclaim_done.cost_seconds}
        case "sync_done":
            sync = event.sync_done
            return "weights_synced", {"hybrid": sync.hybrid, "seconds": sync.seconds, "version": sync.weight_version}
        case _:
            return None
