"""Follows a run's buffer and engine controller, and turns what they stream into events of the run.

Invariants: a stream that breaks is taken up again, group events from the next one on, so none is told twice or left out
while the buffer keeps them; a controller's new incarnation voids what was confirmed before anything else of it is used.
A decision waits for a reading of what runs only where the policy uses it and the last one is old, and never for long:
without one the policy goes on from the last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from services.runtime.errors import Code, TurnoutError
from services.runtime.logs import get_logger
from services.scheduler.domain import events, group_events
from services.scheduler.hosted import HostedRun
from services.scheduler.policies.types import Point
from services.scheduler.readings import counters_of, on_hybrid, requests_of
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2

_RETRY_S = 0.5
"""Pause before a broken stream is taken up again, wall time: a restarted peer is followed at once, a dead one costs
nothing."""

_FRESH_S = 2.0
"""A reading as old as this is taken again before a decision, domain seconds; decoding goes a few dozen tokens further
meanwhile. In a wait, where a decision is due at every arrival, those that come by themselves are fresh enough."""

_log = get_logger("scheduler")

_REASONS = {reason.value for reason in group_events.EvictionReason}
_EXITS = {exit.value: exit for exit in group_events.GroupExit}


class Observer:
    """The streams of one run, in tasks that end with `close`; they go on from where the run's `following` says."""

    def __init__(self, hosted: HostedRun) -> None:
        self._hosted = hosted
        self._following = hosted.following
        self._tasks: list[asyncio.Task[None]] = []
        self._replicas: dict[str, engine_pb2.Replica] = {}
        self._read_at: float | None = None
        self._turns = Turns()
        self._reports = Reports()
        hosted.stop_following = self.close
        hosted.read_progress = self.read_progress

    def start(self) -> None:
        """Begin to follow."""
        streams: list[Callable[[], Awaitable[None]]] = [self._groups, self._controller]
        if self._hosted.tools.settings.watch_progress:
            streams.append(self._progress)
        self._tasks = [asyncio.get_running_loop().create_task(self._keep(stream)) for stream in streams]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _keep(self, stream: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await stream()
            except TurnoutError as error:
                if error.code is Code.UNIMPLEMENTED:
                    return
                if error.reason in ("EVENTS_TRIMMED", "EVENTS_AHEAD"):
                    # Gone, or of another life of the buffer: what happens from now on is better than nothing for ever.
                    self._following.next_group_event = None
            except Exception:
                _log.exception("following a run failed", run_id=self._hosted.run.run_id)
            await asyncio.sleep(_RETRY_S)

    # ------------------------------------------------------------------------------------------------- groups

    async def _groups(self) -> None:
        async for message in self._hosted.buffer.watch_groups(self._following.next_group_event):
            batch = [event for event in message.events if event.partition == self._hosted.run.config.partition]
            for event in _added_together(batch):
                self._group(event)
            numbered = [event.sequence for event in message.events if event.sequence]
            if numbered:
                self._following.next_group_event = numbered[-1] + 1

    def _group(self, event: buffer_pb2.GroupEvent | group_events.GroupsAdded) -> None:
        happened = event if isinstance(event, group_events.GroupsAdded) else self._group_happened(event)
        if happened is not None:
            self._hosted.run.record(happened, self._hosted.moment)

    def _group_happened(self, event: buffer_pb2.GroupEvent) -> events.Happening | None:
        match event.kind:
            case buffer_pb2.GROUP_EVENT_KIND_TRAJECTORY_FINISHED:
                self._following.last_replica = event.replica_id
                self._turns.settle(event.group_id, event.index)
                self._reports.settle(event.group_id, event.index)
                length = event.lengths[0] if event.lengths else 0
                pool = self._on_hybrid(event.replica_id)
                return group_events.TrajectoryFinished(event.group_id, event.index, length, event.replica_id, pool)
            case buffer_pb2.GROUP_EVENT_KIND_FINISHED:
                self._forget(event.group_id)
                pool = self._on_hybrid(event.replica_id or self._following.last_replica)
                return group_events.GroupFinished(event.group_id, tuple(event.lengths), event.born_step, pool)
            case buffer_pb2.GROUP_EVENT_KIND_PROGRESS:
                self._reports.told(event.group_id, event.index, event.done)
            case buffer_pb2.GROUP_EVENT_KIND_REISSUED:
                self._reports.forget(event.group_id)
                return group_events.TrajectoriesReissued(event.group_id, event.trajectories)
            case kind if kind in _EXITS:
                self._forget(event.group_id)
                return group_events.GroupLeft(event.group_id, _EXITS[kind], _reasons(event.reasons))
        return None

    def _forget(self, group_id: str) -> None:
        self._turns.forget(group_id)
        self._reports.forget(group_id)

    def _on_hybrid(self, replica_id: str) -> bool | None:
        return on_hybrid(self._replicas.get(replica_id))

    # --------------------------------------------------------------------------------------------- controller

    async def _controller(self) -> None:
        first = True
        try:
            async for message in self._hosted.engine.watch_replicas():
                if first:
                    self._replicas.clear()
                    first = False
                for replica in message.changed:
                    self._replicas[replica.spec.replica_id] = replica
                for replica_id in message.removed:
                    self._replicas.pop(replica_id, None)
                self._saw(message.incarnation)
        finally:
            self._hosted.dark_since = None

    def _saw(self, incarnation: str) -> None:
        run, moment = self._hosted.run, self._hosted.moment
        run.modes.restarted(incarnation)
        if run.can_lend:
            hybrids = self._of_role(engine_pb2.REPLICA_ROLE_HYBRID)
            run.modes.saw(incarnation, {r.spec.replica_id: r.confirmed_free for r in hybrids})
        run.note_mode(moment)
        self._note_dark()
        topology = self._present_topology()
        if topology != self._following.topology:
            self._following.topology = topology
            run.record(topology, moment)

    def _note_dark(self) -> None:
        hosted, serving = self._hosted, engine_pb2.ROUTE_STATE_SERVING
        if any(replica.route == serving for replica in self._replicas.values()):
            hosted.dark_since = None
        elif hosted.dark_since is None:
            hosted.dark_since = hosted.tools.clock.now()
            hosted.wake_waits()

    def _of_role(self, role: int) -> list[engine_pb2.Replica]:
        return [replica for replica in self._replicas.values() if replica.spec.role == role]

    def _present_topology(self) -> events.TopologyChanged:
        healthy = engine_pb2.REPLICA_HEALTH_HEALTHY
        hybrids = [r for r in self._of_role(engine_pb2.REPLICA_ROLE_HYBRID) if r.health == healthy]
        standalone = [r for r in self._of_role(engine_pb2.REPLICA_ROLE_STANDALONE) if r.health == healthy]
        return events.TopologyChanged(len(hybrids), len(standalone), _gpus(hybrids), _gpus(standalone))

    # ------------------------------------------------------------------------------------------------ progress

    async def _progress(self) -> None:
        interval_s = self._hosted.tools.settings.progress_interval_s
        async for message in self._hosted.engine.watch_progress(interval_s):
            self._saw_progress(message.report)

    def _saw_progress(self, report: engine_pb2.ProgressReport) -> None:
        run, moment = self._hosted.run, self._hosted.moment
        self._read_at = moment.now
        run.record(requests_of(report, run.config.partition, self._turns, self._reports), moment)
        run.record(counters_of(report, self._replicas), moment)

    async def read_progress(self, point: Point) -> None:
        """Let a policy that predicts see what runs now, before it is asked at `point`."""
        settings, now = self._hosted.tools.settings, self._hosted.tools.clock.now()
        if not (settings.watch_progress and self._hosted.run.reads_progress(point)):
            return
        oldest_s = settings.progress_interval_s if point is Point.WAITING else _FRESH_S
        if self._read_at is not None and now - self._read_at < oldest_s:
            return
        # Also of one that fails: a controller that does not answer keeps one decision waiting, not each.
        self._read_at = now
        with contextlib.suppress(TurnoutError):
            self._saw_progress(await self._hosted.engine.progress(settings.progress_timeout_s))


def _reasons(reasons: Iterable[int]) -> tuple[group_events.EvictionReason, ...]:
    """The reasons of an eviction that are known here."""
    return tuple(group_events.EvictionReason(reason) for reason in reasons if reason in _REASONS)


def _gpus(replicas: list[engine_pb2.Replica]) -> int:
    return sum(len(replica.spec.gpus) for replica in replicas)


def _added_together(batch: list[buffer_pb2.GroupEvent]) -> list[buffer_pb2.GroupEvent | group_events.GroupsAdded]:
    """The events, with neighbouring ADDED ones of one born step as one."""
    told: list[buffer_pb2.GroupEvent | group_events.GroupsAdded] = []
    for event in batch:
        if event.kind != buffer_pb2.GROUP_EVENT_KIND_ADDED:
            told.append(event)
            continue
        before = told[-1] if told else None
        if isinstance(before, group_events.GroupsAdded) and before.born_step == event.born_step:
            told[-1] = group_events.GroupsAdded(
                (*before.group_ids, event.group_id), before.born_step, (*before.group_sizes, event.trajectories)
            )
        else:
            told.append(group_events.GroupsAdded((event.group_id,), event.born_step, (event.trajectories,)))
    return told
