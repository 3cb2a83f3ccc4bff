"""A run's books, folded from its events; pure.

Invariants: events are folded in order, each once; times are seconds of the run's clock; what the events do not tell is
None, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from services.views.report.lanes import Lanes
from services.views.report.lends import Lend, Lends
from services.views.run_state import action_name, lent_seconds, point_name
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import events_pb2


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer, with what it rests on."""

    at: float
    step: int
    point: str
    action: str
    policy: str
    reason: str
    numbers: Mapping[str, float]
    predicted_wait_s: float | None
    threshold: int | None
    shadow: bool

    @property
    def is_news(self) -> bool:
        """Whether a reader wants to see it: "not yet", answered at every arrival, is no news."""
        return self.action != "keep" or self.point == "step end"


@dataclass(slots=True)
class StepAccount:
    """One step. wait_s: waited for mini-batches with the GPUs in hand; lent_s: from its begin until they were ordered
    back; sync_s, lend_s, reclaim_s: moving weights and GPUs. predicted_wait_s: of the decision that took the GPUs
    back, or that left them with the trainer at the step before. recomputed, blackout_s: tokens that its weight updates
    had engines compute again, and seconds without a replica that served. ages: steps that each group trained on had
    waited since it was added."""

    number: int
    began_at: float
    ended_at: float | None = None
    wait_s: float = 0.0
    lent_s: float = 0.0
    sync_s: float = 0.0
    lend_s: float = 0.0
    reclaim_s: float = 0.0
    recomputed: int = 0
    blackout_s: float = 0.0
    predicted_wait_s: float | None = None
    reclaimed_at_depth: int | None = None
    ages: list[int] = field(default_factory=list)

    @property
    def train_s(self) -> float | None:
        """What is neither waiting nor moving; None while the step goes on."""
        if self.ended_at is None:
            return None
        return max(self.ended_at - self.began_at - self.wait_s - self.lent_s - self.reclaim_s, 0.0)

    @property
    def mean_age(self) -> float | None:
        """Mean of `ages`."""
        return fmean(self.ages) if self.ages else None


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that did not go as it should."""

    at: float
    text: str


class RunAccount:
    """A run, as its events tell."""

    def __init__(self) -> None:
        self.sequence = 0
        self.first_at: float | None = None
        self.is_whole = True
        """Whether the events begin with the run's first."""
        self.at = 0.0
        self.policy = ""
        self.epochs: list[int] = []
        self.closed_because: str | None = None
        self.steps: list[StepAccount] = []
        self.decisions: list[Decision] = []
        self.asked = 0
        """Decisions, those that are no news included."""
        self.depths: list[tuple[float, float]] = []
        self.thresholds: list[tuple[float, float]] = []
        self.troubles: list[Trouble] = []
        self.lanes = Lanes()
        self._lends = Lends()
        self._born: dict[str, int] = {}
        self._foreseen: float | None = None

    # ------------------------------------------------------------------------------------------------------- results

    @property
    def lends(self) -> list[Lend]:
        """All lends, the open one included."""
        return self._lends.all

    @property
    def began_at(self) -> float:
        """When the first kept event happened."""
        return self.first_at or 0.0

    @property
    def seconds(self) -> float:
        """From the first kept event to the last."""
        return self.at - self.began_at

    @property
    def waited_s(self) -> float:
        """All the time that the trainer waited for rollouts, its GPUs lent or not."""
        return sum(step.wait_s + step.lent_s for step in self.steps)

    @property
    def mean_age(self) -> float | None:
        """Steps since they were added, mean over all groups trained on."""
        ages = [age for step in self.steps for age in step.ages]
        return fmean(ages) if ages else None

    @property
    def prediction_error_s(self) -> float | None:
        """Mean size of predicted less realised wait, over the steps that had a prediction."""
        errors = [
            abs(step.predicted_wait_s - step.wait_s)
            for step in self.steps
            if step.predicted_wait_s is not None and step.ended_at is not None
        ]
        return fmean(errors) if errors else None

    # ------------------------------------------------------------------------------------------------------- folding

    def fold(self, event: events_pb2.RunEvent) -> None:
        """Take in one event; one that was folded before changes nothing."""
        if event.sequence <= self.sequence:
            return
        if self.first_at is None:
            self.first_at = event.at
            self.is_whole = event.sequence == 1
        self.sequence = event.sequence
        self.at = max(self.at, event.at)
        self.lanes.fold(event)
        self._lends.fold(event)
        name = event.WhichOneof("event")
        if name is not None and (handler := _HANDLERS.get(name)) is not None:
            handler(self, event)

    def _run_opened(self, event: events_pb2.RunEvent) -> None:
        self.epochs.append(event.run_opened.epoch)
        self.closed_because = None
        if event.run_opened.resumed:
            self._born.clear()
            step = event.run_opened.step
            self.steps = [one for one in self.steps if one.number <= step]

    def _run_closed(self, event: events_pb2.RunEvent) -> None:
        self.closed_because = event.run_closed.reason or "no reason given"

    def _groups_added(self, event: events_pb2.RunEvent) -> None:
        for group_id in event.groups_added.group_ids:
            self._born[group_id] = event.groups_added.born_step

    def _group_left(self, event: events_pb2.RunEvent) -> None:
        left = event.group_left
        if left.how == buffer_pb2.GROUP_EVENT_KIND_SAMPLED and self.steps and left.group_id in self._born:
            self.steps[-1].ages.append(max(self.steps[-1].number - self._born[left.group_id], 0))
        elif left.how == buffer_pb2.GROUP_EVENT_KIND_RETURNED and self.steps and self.steps[-1].ages:
            self.steps[-1].ages.pop()
        elif left.how in (buffer_pb2.GROUP_EVENT_KIND_COMMITTED, buffer_pb2.GROUP_EVENT_KIND_EVICTED):
            self._born.pop(left.group_id, None)

    def _depth_observed(self, event: events_pb2.RunEvent) -> None:
        self.depths.append((event.at, float(event.depth_observed.sampleable)))

    def _step_began(self, event: events_pb2.RunEvent) -> None:
        if self.steps and self.steps[-1].number == event.step_began.step:
            return
        self.steps.append(StepAccount(event.step_began.step, event.at, predicted_wait_s=self._foreseen))
        self._foreseen = None

    def _step_ended(self, event: events_pb2.RunEvent) -> None:
        if self.steps:
            self.steps[-1].ended_at = event.at

    def _mini_batch_ended(self, event: events_pb2.RunEvent) -> None:
        if self.steps:
            self.steps[-1].wait_s += event.mini_batch_ended.wait_seconds

    def _sync_done(self, event: events_pb2.RunEvent) -> None:
        if not self.steps:
            return
        step, sync = self.steps[-1], event.sync_done
        if not sync.hybrid:
            step.sync_s += sync.seconds
        step.recomputed += sync.tokens_recomputed
        step.blackout_s += sync.blackout_seconds

    def _lend_done(self, event: events_pb2.RunEvent) -> None:
        if self.steps:
            self.steps[-1].lend_s += event.lend_done.cost_seconds

    def _reclaim_done(self, event: events_pb2.RunEvent) -> None:
        step = self.steps[-1] if self.steps else None
        if step is not None and step.ended_at is None:
            step.reclaim_s += event.reclaim_done.cost_seconds
            step.lent_s += lent_seconds(event, step.began_at)
            step.reclaimed_at_depth = int(self.depths[-1][1]) if self.depths else None

    def _lend_abandoned(self, event: events_pb2.RunEvent) -> None:
        self.troubles.append(Trouble(event.at, f"Lend abandoned: {event.lend_abandoned.reason}"))

    def _transition_failed(self, event: events_pb2.RunEvent) -> None:
        failed = event.transition_failed
        self.troubles.append(Trouble(event.at, f"{failed.reason}: {failed.message}"))

    def _decision_made(self, event: events_pb2.RunEvent) -> None:
        made = event.decision_made
        decision = Decision(
            event.at,
            made.step,
            point_name(made.point),
            action_name(made.action),
            made.policy,
            made.reason,
            dict(made.numbers),
            made.predicted_wait_seconds if made.HasField("predicted_wait_seconds") else None,
            made.threshold if made.HasField("threshold") else None,
            made.shadow,
        )
        self.asked += 1
        if decision.is_news:
            self.decisions.append(decision)
        if decision.shadow:
            return
        self.policy = decision.policy
        if decision.threshold is not None:
            self.thresholds.append((event.at, float(decision.threshold)))
        if decision.predicted_wait_s is None:
            return
        if decision.action == "reclaim" and self.steps:
            self.steps[-1].predicted_wait_s = decision.predicted_wait_s
        elif decision.point == "step end" and decision.action == "keep":
            self._foreseen = decision.predicted_wait_s


_Handler = Callable[[RunAccount, events_pb2.RunEvent], None]
_HANDLERS: Final[dict[str, _Handler]] = {
    "run_opened": RunAccount._run_opened,
    "run_closed": RunAccount._run_closed,
    "groups_added": RunAccount._groups_added,
    "group_left": RunAccount._group_left,
    "depth_observed": RunAccount._depth_observed,
    "step_began": RunAccount._step_began,
    "step_ended": RunAccount._step_ended,
    "mini_batch_ended": RunAccount._mini_batch_ended,
    "sync_done": RunAccount._sync_done,
    "lend_done": RunAccount._lend_done,
    "reclaim_done": RunAccount._reclaim_done,
    "lend_abandoned": RunAccount._lend_abandoned,
    "transition_failed": RunAccount._transition_failed,
    "decision_made": RunAccount._decision_made,
}


def account_of(events: Iterable[events_pb2.RunEvent]) -> RunAccount:
    """The account of a run's events, in their order."""
    account = RunAccount()
    for event in events:
        account.fold(event)
    return account
