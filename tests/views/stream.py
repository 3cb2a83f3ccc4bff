"""A run's events as a scheduler would tell them, of any length."""

import random

from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2

TRAINER, LENDING = events_pb2.MODE_TRAINER, events_pb2.MODE_LENDING
ROLLOUT, RECLAIMING = events_pb2.MODE_ROLLOUT, events_pb2.MODE_RECLAIMING
MINI_BATCHES = 4


class Stream:
    """Collects events with a clock that only `wait` moves."""

    def __init__(self, seed: int = 0) -> None:
        self.events: list[events_pb2.RunEvent] = []
        self.now = 0.0
        self.random = random.Random(seed)
        self.mode = TRAINER
        self._lent_at = 0.0
        self._lend: tuple[str, float, float] | None = None
        self._tokens = {f"{role}-{n}": 0 for role, count in (("standalone", 2), ("hybrid", 4)) for n in range(count)}

    def tell(self, **event: object) -> None:
        """Add an event of one kind."""
        self.events.append(events_pb2.RunEvent(sequence=len(self.events) + 1, at=self.now, **event))  # type: ignore[arg-type]

    def go(self, mode: events_pb2.Mode.ValueType) -> None:
        """Change the mode."""
        self.tell(mode_changed=events_pb2.ModeChanged(**{"from": self.mode, "to": mode}))  # type: ignore[arg-type]
        self.mode = mode

    def wait(self, seconds: float) -> None:
        """Let time pass, with a reading of the replicas every 10 s."""
        ends = self.now + seconds
        while self.now < ends:
            passed = min(10.0, ends - self.now)
            self.now += passed
            readings = []
            for name in self._tokens:
                hybrid = name.startswith("hybrid")
                busy = not hybrid or self.mode == ROLLOUT
                self._tokens[name] += round(4000 * passed) if busy else 0
                readings.append(
                    events_pb2.ReplicaReading(
                        replica_id=name,
                        hybrid=hybrid,
                        decoded_tokens=self._tokens[name],
                        running=64 if busy else 0,
                        route=engine_pb2.ROUTE_STATE_SERVING if busy else engine_pb2.ROUTE_STATE_OUT,
                    )
                )
            self.tell(replica_counters=events_pb2.ReplicaCounters(replicas=readings))

    def lend(self, kind: events_pb2.LendKind.ValueType, cost_s: float = 15.0) -> None:
        """Lend, as long as it takes."""
        self.go(LENDING)
        self.wait(cost_s)
        self.go(ROLLOUT)
        self._lend, self._lent_at = (f"l{self.now:.0f}", cost_s, 0.0), self.now
        self.tell(lend_done=events_pb2.LendDone(lend_id=self._lend[0], kind=kind, cost_seconds=cost_s, counted=True))

    def reclaim(self, cost_s: float = 5.0) -> None:
        """Take back."""
        if self._lend is not None:
            self._lend = (self._lend[0], self._lend[1] + cost_s, self.now - self._lent_at)
        self.go(RECLAIMING)
        self.wait(cost_s)
        self.go(TRAINER)
        self.tell(reclaim_done=events_pb2.ReclaimDone(cost_seconds=cost_s, counted=True))

    def settle(self) -> None:
        """Tell what the lend that is over brought: four hybrids at the speed of the two standalone ones."""
        assert self._lend is not None
        lend_id, switch_s, served_s = self._lend
        self._lend = None
        self.tell(
            lend_goodput=events_pb2.LendGoodput(
                lend_id=lend_id,
                decoded_tokens=round(16_000 * served_s),
                delivered_tokens=round(9_000 * served_s),
                switch_seconds=switch_s,
                saved_at_most_seconds=2 * served_s - switch_s,
                lost_seconds=switch_s + 10.0,
                predicted_alone_seconds=40.0,
                gained_seconds=30.0 - switch_s,
            )
        )


def decision(
    step: int,
    point: events_pb2.DecisionPoint.ValueType,
    action: events_pb2.DecisionAction.ValueType,
    reason: str,
    predicted: float | None = None,
) -> events_pb2.DecisionMade:
    """A decision of `jit` with some numbers."""
    return events_pb2.DecisionMade(
        step=step,
        point=point,
        action=action,
        policy="jit",
        reason=reason,
        numbers={"sampleable_count": 41.0, "gain_seconds": 12.5},
        predicted_wait_seconds=predicted,
        threshold=26,
    )


def steps(count: int, seed: int = 0) -> list[events_pb2.RunEvent]:
    """A run of `count` steps, opened, lent at its start and after two steps of three, and closed."""
    stream = Stream(seed)
    stream.tell(run_opened=events_pb2.RunOpened(epoch=1))
    stream.lend(events_pb2.LEND_KIND_INIT)
    for step in range(1, count + 1):
        _step(stream, step, last=step == count)
    stream.tell(run_closed=events_pb2.RunClosed(reason="done <&> all"))
    return stream.events


def _step(stream: Stream, step: int, *, last: bool) -> None:
    draw = stream.random
    groups = [f"g{step}-{n}" for n in range(64)]
    stream.tell(step_began=events_pb2.StepBegan(step=step))
    stream.tell(groups_added=events_pb2.GroupsAdded(group_ids=groups, born_step=step, group_sizes=[8] * 64))
    lent = stream.mode == ROLLOUT
    if lent:
        for sampleable in range(8, 41, 4):
            stream.wait(draw.uniform(2, 9))
            stream.tell(depth_observed=events_pb2.DepthObserved(step=step, sampleable=sampleable, in_flight=60))
            keep = decision(step, events_pb2.DECISION_POINT_WAITING, events_pb2.DECISION_ACTION_KEEP, "Not yet.")
            stream.tell(decision_made=keep)
        reason = "Reclaimed at 41 groups: the remaining 23 should arrive 4 s before they are needed."
        point, action = events_pb2.DECISION_POINT_WAITING, events_pb2.DECISION_ACTION_RECLAIM
        stream.tell(decision_made=decision(step, point, action, reason, predicted=draw.uniform(0, 30)))
        stream.reclaim(draw.uniform(4, 7))
    for mini_batch in range(MINI_BATCHES):
        stream.tell(mini_batch_began=events_pb2.MiniBatchBegan(step=step, mini_batch=mini_batch))
        waited = draw.uniform(0, 12) if mini_batch == 3 else 0.0
        stream.wait(waited)
        ended = events_pb2.MiniBatchEnded(step=step, mini_batch=mini_batch, wait_seconds=waited)
        stream.tell(mini_batch_ended=ended)
        for group in groups[16 * mini_batch : 16 * mini_batch + 16]:
            left = events_pb2.GroupLeft(group_id=group, how=buffer_pb2.GROUP_EVENT_KIND_SAMPLED)
            stream.tell(group_left=left)
        stream.wait(64)
        depth = events_pb2.DepthObserved(step=step, sampleable=40 - 8 * mini_batch, in_flight=60)
        stream.tell(depth_observed=depth)
    stream.tell(step_ended=events_pb2.StepEnded(step=step))
    if lent:
        stream.settle()
    lends = not last and step % 3 != 0
    action = events_pb2.DECISION_ACTION_LEND if lends else events_pb2.DECISION_ACTION_KEEP
    reason = "The next step would wait 92 s for rollouts; lending ends it 40 s sooner."
    stream.tell(decision_made=decision(step, events_pb2.DECISION_POINT_STEP_END, action, reason, predicted=20.0))
    stream.wait(18)
    synced = events_pb2.SyncDone(
        hybrid=False, seconds=18.0, weight_version=step, tokens_recomputed=1000 * step, blackout_seconds=2.0
    )
    stream.tell(sync_done=synced)
    if lends:
        stream.lend(events_pb2.LEND_KIND_STEP_END, draw.uniform(12, 18))
