"""The run as a whole, without anything around it."""

from dataclasses import replace

import pytest

from services.runtime.errors import TurnoutError
from services.scheduler import policies
from services.scheduler.domain import events
from services.scheduler.domain.calls import Call, CallKey
from services.scheduler.domain.events import LendKind, Mode
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.resume import Resume
from services.scheduler.domain.run import Depth, Moment, Run
from services.scheduler.packing import PACKING
from services.scheduler.policies.types import Action, Point
from tests.scheduler.domain.test_config import GOOD


def moment(now: float) -> Moment:
    return Moment(now, 1_700_000_000.0 + now)


def opened(scale: float = 1.0) -> Run:
    run = Run("run", GOOD, policies.create, EventLog(1000, PACKING), scale, moment(100.0))
    run.open(1, GOOD, None, moment(100.0))
    return run


def lent(run: Run) -> Run:
    lend = Lend("x", LendKind.INIT, 0)
    run.begin_lend(lend, moment(101.0))
    run.completed(lend, 1.0, moment(102.0))
    return run


def happened(run: Run) -> list[str]:
    return [type(placed.event).__name__ for placed in run.log.read(1, 1000)]


def test_the_clock_of_a_run_starts_when_it_is_first_opened() -> None:
    """Times of two runs, or of one after a restart of the host, could otherwise not be read."""
    run = opened()
    run.record(events.StepBegan(1), moment(107.5))
    assert [placed.at for placed in run.log.read(1, 10)] == [0.0, 7.5]


def test_the_lease_is_wall_time_whatever_the_time_scale() -> None:
    """In a demo that runs a hundred times as fast, a minute of lease would be over in 0.6 s."""
    assert opened(scale=0.01).lease.left_s(100.0) == 6000.0


def test_lower_and_higher_epochs_are_refused() -> None:
    """A trainer that was succeeded must not move a GPU of its successor."""
    run = opened()
    run.check_epoch(1)
    for epoch, reason in ((0, "STALE_EPOCH"), (2, "UNKNOWN_EPOCH")):
        with pytest.raises(TurnoutError) as caught:
            run.check_epoch(epoch)
        assert caught.value.reason == reason


def test_every_change_of_mode_is_told_once() -> None:
    """`turnout top` shows what the events say."""
    run = lent(opened())
    run.reclaiming(moment(103.0))
    run.reclaiming(moment(103.5))
    run.returned(2.0, moment(104.0))
    changes = [placed.event for placed in run.log.read(1, 99) if isinstance(placed.event, events.ModeChanged)]
    assert [(change.before, change.to) for change in changes] == [
        (Mode.TRAINER, Mode.LENDING),
        (Mode.LENDING, Mode.ROLLOUT),
        (Mode.ROLLOUT, Mode.RECLAIMING),
        (Mode.RECLAIMING, Mode.TRAINER),
    ]
    assert changes[0].lend_id == "x"


def test_gpus_that_never_served_are_returned_without_a_reclaim() -> None:
    """An undone lend that counted as a reclaim would put its cost into the window."""
    run = opened()
    lend = Lend("x", LendKind.STEP_END, 1)
    run.begin_lend(lend, moment(101.0))
    run.abandoned(lend, "no weights", moment(102.0))
    run.returned(1.0, moment(103.0))
    assert run.reclaims == 0
    assert "ReclaimDone" not in happened(run)
    assert run.mode is Mode.TRAINER


def test_a_repeated_begin_step_is_noted_once() -> None:
    """The first try may have failed after it was noted; waits must be reset once, and events told once."""
    run = opened()
    run.begin_step(1, moment(101.0))
    run.timings.waited(3.0)
    run.begin_step(1, moment(102.0))
    assert happened(run).count("StepBegan") == 1
    assert run.timings.metrics()["timing_s/switch_wait"] == 3.0


def test_a_change_of_configuration_waits_for_the_next_step() -> None:
    """A ratio that changes within a step would move the threshold the trainer already waits for."""
    run = opened()
    run.begin_step(1, moment(101.0))
    run.reconfigure(replace(GOOD, total_training_steps=99))
    assert run.config.total_training_steps == 10
    assert run.next_config.total_training_steps == 99
    run.begin_step(2, moment(102.0))
    assert run.config.total_training_steps == 99
    assert happened(run)[-2:] == ["RunUpdated", "StepBegan"]


def test_a_new_policy_learns_from_the_log_what_the_old_one_knew() -> None:
    """A policy that does not know that GPUs are lent would never take them back."""
    run = lent(opened())
    run.reconfigure(replace(GOOD, policy="fixed"))
    run.begin_step(1, moment(103.0))
    run.observe_depth(Depth(1, 64, 0, 0), moment(104.0))
    decision = run.decide(Point.STEP_BEGIN, 1, moment(104.0))
    assert decision.action is Action.RECLAIM
    made = run.log.read(run.log.last, 1)[0].event
    assert isinstance(made, events.DecisionMade)
    assert made.policy == "fixed"


def test_a_wait_tells_its_first_decision_and_those_that_differ() -> None:
    """Hundreds of equal decisions a second would push everything else out of the log."""
    run = lent(opened())
    run.begin_step(1, moment(103.0))
    for sampleable in (1, 2, 3, 60):
        run.observe_depth(Depth(1, sampleable, 100, 0), moment(104.0))
        run.decide(Point.WAITING, 1, moment(104.0))
    made = [placed.event for placed in run.log.read(1, 99) if isinstance(placed.event, events.DecisionMade)]
    assert [decision.action.name for decision in made] == ["KEEP", "RECLAIM"]
    assert made[0].numbers["threshold"] == 26
    assert run.threshold == 26


def test_starvation_begins_only_when_groups_are_missing() -> None:
    """A mini-batch that is there at once is no starvation; its wait is still told."""
    run = opened()
    run.begin_step(1, moment(101.0))
    run.begin_sample(0, Depth(1, 20, 0, 0), moment(102.0))
    run.end_sample(1, 0, 0.1, None, moment(103.0))
    run.begin_sample(1, Depth(1, 4, 0, 0), moment(104.0))
    run.end_sample(1, 1, 5.0, 10, moment(105.0))
    assert happened(run)[2:] == [
        "DepthObserved",
        "MiniBatchBegan",
        "MiniBatchEnded",
        "DepthObserved",
        "MiniBatchBegan",
        "StarvationBegan",
        "StarvationEnded",
        "MiniBatchEnded",
    ]


def test_a_new_trainer_begins_where_it_says_and_abandons_what_was_open() -> None:
    """A lend of the old trainer that stayed open would block the first call of the new one."""
    run = opened()
    run.begin_lend(Lend("x", LendKind.STEP_END, 1), moment(101.0))
    run.open(2, GOOD, Resume(7, keep_live=True), moment(102.0))
    run.taken_over(0.0, moment(102.0))
    assert run.lends.open is None
    assert (run.step, run.epoch, run.mode) == (7, 2, Mode.TRAINER)
    run.order.check(CallKey(Call.BEGIN_STEP, 8))
    last = [p.event for p in run.log.read(1, 99) if isinstance(p.event, events.RunOpened)][-1]
    assert (last.epoch, last.step, last.resumed) == (2, 7, True)


def test_a_takeover_from_served_gpus_tells_the_policy_that_they_are_back() -> None:
    """A policy that believes them lent would answer RECLAIM for ever; its cost is no ordinary reclaim's."""
    run = lent(opened())
    run.open(2, GOOD, Resume(1, keep_live=True), moment(110.0))
    run.taken_over(8.0, moment(111.0))
    done = [p.event for p in run.log.read(1, 99) if isinstance(p.event, events.ReclaimDone)]
    assert done == [events.ReclaimDone(8.0, counted=False)]


def test_a_checkpoint_brings_back_what_the_policy_had_learned() -> None:
    """A resumed job that forgot its waits and costs would begin with lends that do not pay."""
    run = lent(opened())
    run.begin_step(1, moment(103.0))
    run.returned(4.0, moment(104.0))
    saved = run.save()
    before = run.decide(Point.SAMPLE_BEGIN, 1, moment(105.0))
    for cost_s in (1000.0, 1000.0, 1000.0):
        run.record(events.ReclaimDone(cost_s, counted=True), moment(106.0))
    run.open(2, GOOD, Resume(0, "checkpoint"), moment(107.0), saved)
    assert cost_after_a_lend(run) == 10.0
    assert before.action is Action.KEEP
    assert saved.step == 0


def cost_after_a_lend(run: Run) -> float:
    """What the policy takes a round trip for at the end of step 1, after one lend of 6 s."""
    run.record(events.LendDone("y", LendKind.STEP_END, 6.0, counted=True), moment(107.0))
    run.record(events.StepBegan(1), moment(107.0))
    run.record(events.StepEnded(1), moment(108.0))
    run.observe_depth(Depth(2, 0, 0, 0), moment(108.0))
    return run.decide(Point.STEP_END, 1, moment(108.0)).numbers["effective_switch_cost_seconds"]


def test_a_checkpoint_is_gone_back_to_whatever_policy_the_run_had_meanwhile() -> None:
    """Compared with the policy of before the resume, the roll-back was left out and later costs counted."""
    run = lent(opened())
    run.begin_step(1, moment(103.0))
    run.returned(4.0, moment(104.0))
    saved = run.save()
    run.reconfigure(replace(GOOD, policy="fixed"))
    run.begin_step(2, moment(105.0))
    for cost_s in (1000.0, 1000.0, 1000.0):
        run.record(events.ReclaimDone(cost_s, counted=True), moment(106.0))
    run.open(2, GOOD, Resume(0, "checkpoint"), moment(107.0), saved)
    assert cost_after_a_lend(run) == 10.0


def test_a_checkpoint_of_another_policy_is_left_alone() -> None:
    """What `fixed` learned means nothing to `verl`."""
    run = opened()
    saved = run.save()
    other = Run("run", replace(GOOD, policy="fixed"), policies.create, EventLog(1000, PACKING), 1.0, moment(0.0))
    other.open(2, other.config, Resume(0, "checkpoint"), moment(1.0), saved)
    other.decide(Point.SAMPLE_BEGIN, 0, moment(1.0))
    made = other.log.read(other.log.last, 1)[0].event
    assert isinstance(made, events.DecisionMade)
    assert made.policy == "fixed"


def test_a_mini_batch_that_is_asked_for_again_is_noted_once() -> None:
    """Counted twice, its missing groups would make every later wait look shorter than it was."""
    run = opened()
    run.begin_step(1, moment(101.0))
    for now in (102.0, 103.0):
        run.begin_sample(0, Depth(1, 0, 0, 0), moment(now))
    names = [type(placed.event).__name__ for placed in run.log.read(1, 99)]
    assert names.count("MiniBatchBegan") == names.count("StarvationBegan") == 1
