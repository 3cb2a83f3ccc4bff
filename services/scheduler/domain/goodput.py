"""What a lend brought, told when the step is over in which the trainer had its GPUs back.

Invariants: the same events give the same account; tokens on lent GPUs are counted from the last reading before they
served, as asleep they decode nothing; a replica that restarted counts from zero again.

Formulas: saved at most = tokens decoded on lent GPUs / tokens per second of the standalone replicas during the lend -
seconds of switching, an upper bound, since a token that nobody waited for saved nothing. Gained = wait that the policy
predicted without the lend - seconds that the trainer lost to waiting and switching with it. The trainer's own measure
of a wait within a step covers the lend and the reclaim in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.domain import events, group_events
from services.scheduler.domain.events import DecisionAction, LendKind

_ALONE = "wait_alone_seconds"
"""Number of a decision to lend: the wait without it."""


@dataclass(slots=True)
class _Tokens:
    """Tokens of one pool since it was looked at first, by replica."""

    last: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def read(self, replica_id: str, decoded: int) -> None:
        before = self.last.get(replica_id, decoded)
        self.total += decoded - before if decoded >= before else decoded
        self.last[replica_id] = decoded


@dataclass(slots=True)
class _Account:
    """One lend. lost_s: what the trainer lost so far. waits_from: when it began to wait with its GPUs lent, None if it
    does not, or if its own measure of the wait will cover it."""

    lend_id: str
    kind: LendKind
    switch_s: float
    lost_s: float
    alone_s: float | None
    waits_from: float | None = None
    ordered_back: bool = False
    returned: bool = False
    ended_there: int = 0
    hybrid: _Tokens = field(default_factory=_Tokens)
    kept: _Tokens = field(default_factory=_Tokens)
    counts_kept: bool = False
    standalone: _Tokens = field(default_factory=_Tokens)
    first_read: float | None = None
    last_read: float | None = None

    def read(self, counters: events.ReplicaCounters, at: float) -> None:
        """Counters at run time `at`. The standalone replicas' speed is that until the GPUs were ordered back."""
        measures = not self.ordered_back
        for reading in counters.replicas:
            if reading.hybrid:
                self.hybrid.read(reading.replica_id, reading.decoded_tokens)
                self.kept.read(reading.replica_id, reading.delivered_tokens or 0)
                self.counts_kept |= reading.delivered_tokens is not None
            elif reading.hybrid is False and measures:
                self.standalone.read(reading.replica_id, reading.decoded_tokens)
        if measures:
            self.first_read = at if self.first_read is None else self.first_read
            self.last_read = at

    def told(self) -> events.LendGoodput:
        """The account."""
        read_s = 0.0 if self.first_read is None or self.last_read is None else self.last_read - self.first_read
        saved_s = None
        if read_s > 0 and self.standalone.total > 0:
            saved_s = self.hybrid.total * read_s / self.standalone.total - self.switch_s
        return events.LendGoodput(
            lend_id=self.lend_id,
            decoded_tokens=self.hybrid.total,
            # Without a count of the controller's own, what is sure are the trajectories that ended there.
            delivered_tokens=self.kept.total if self.counts_kept else self.ended_there,
            switch_seconds=self.switch_s,
            lost_seconds=self.lost_s,
            saved_at_most_seconds=saved_s,
            predicted_alone_seconds=self.alone_s,
            gained_seconds=None if self.alone_s is None else self.alone_s - self.lost_s,
        )


class GoodputMeter:
    """Show it every event of a run, in order."""

    def __init__(self) -> None:
        self._account: _Account | None = None
        self._counters: tuple[events.ReplicaCounters, float] | None = None
        self._alone_s: float | None = None

    def replay(self, past: Iterable[events.RunEvent]) -> None:
        """Go on after events that were told already."""
        for placed in past:
            self.read(placed.event, placed.at)

    def read(self, event: events.Happening, at: float) -> events.LendGoodput | None:
        """Take in what happened at run time `at`; what a lend brought, if that is now known."""
        lend = self._account
        match event:
            case events.DecisionMade(action=DecisionAction.LEND):
                self._alone_s = event.numbers.get(_ALONE)
            case events.LendDone():
                return self._begin(event, at)
            case events.ReplicaCounters():
                self._counters = event, at
                if lend is not None:
                    lend.read(event, at)
            case events.RunOpened():
                self._account = None
            case events.StepEnded() | events.RunClosed() if lend is not None and lend.returned:
                self._account = None
                return lend.told()
            case _ if lend is not None:
                _follow(lend, event, at)
        return None

    def _begin(self, done: events.LendDone, at: float) -> events.LendGoodput | None:
        before, alone_s = self._account, self._alone_s
        decided = done.kind in (LendKind.STEP_END, LendKind.WITHIN_STEP)
        within = done.kind is LendKind.WITHIN_STEP
        self._account = _Account(
            done.lend_id,
            done.kind,
            switch_s=done.cost_seconds,
            lost_s=0.0 if within else done.cost_seconds,
            alone_s=alone_s if decided else None,
        )
        self._alone_s = None
        if self._counters is not None:
            self._account.read(*self._counters)
        # Within a step the trainer may lend again before the step is over.
        return before.told() if before is not None and before.returned else None


def _follow(lend: _Account, event: events.Happening, at: float) -> None:
    """What happens to an open account."""
    match event:
        case events.StepBegan() if lend.kind is not LendKind.WITHIN_STEP and not lend.returned:
            lend.waits_from = at
        case events.ModeChanged(to=events.Mode.RECLAIMING):
            lend.ordered_back = True
        case events.ReclaimDone():
            lend.ordered_back = lend.returned = True
            lend.switch_s += event.cost_seconds
            if lend.waits_from is not None:
                lend.lost_s += at - lend.waits_from
                lend.waits_from = None
        case events.MiniBatchEnded():
            lend.lost_s += event.wait_seconds
        case group_events.TrajectoryFinished(on_hybrid=True) if not lend.returned:
            lend.ended_there += event.length
