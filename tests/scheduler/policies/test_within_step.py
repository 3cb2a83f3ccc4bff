"""Answers between a step's begin and its end."""

import pytest

from services.scheduler.policies import EventOrderError
from services.scheduler.policies.types import (
    Action,
    DepthObserved,
    GroupFinished,
    GroupsAdded,
    MiniBatchBegan,
    MiniBatchEnded,
    NewGroup,
    Point,
    Pool,
    ReplicaCounters,
    RequestKey,
    RequestProgress,
    RequestState,
    RunOpened,
    SyncDone,
    TopologyChanged,
)
from tests.scheduler.policies.drive import Drive, configured

THRESHOLD = 26  # round(0.4 x 64)


@pytest.mark.parametrize("name", ["fixed", "verl"])
class TestThresholdPolicies:
    """`fixed` and `verl` within a step."""

    @pytest.mark.parametrize(
        ("sampleable", "action"), [(0, Action.KEEP), (25, Action.KEEP), (26, Action.RECLAIM), (64, Action.RECLAIM)]
    )
    def test_step_begin_reclaims_at_the_threshold(self, name: str, sampleable: int, action: Action) -> None:
        """One group too early starves the trainer, one too late wastes it."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        drive.depth(1, sampleable)
        decision = drive.decide(Point.STEP_BEGIN)
        assert decision.action is action
        assert decision.threshold == THRESHOLD
        assert decision.numbers["sampleable_count"] == sampleable
        assert f"{sampleable} of 26" in decision.reason

    def test_waiting_reclaims_once_the_threshold_is_reached(self, name: str) -> None:
        """The answer follows each arrival, not the depth of the step's begin."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        answers = []
        for sampleable in (0, 10, 25, 26):
            drive.depth(1, sampleable)
            answers.append(drive.decide(Point.WAITING).action)
        assert answers == [Action.KEEP] * 3 + [Action.RECLAIM]

    def test_threshold_holds_for_the_whole_step(self, name: str) -> None:
        """A threshold that moved while the trainer waits would move the goal of a wait that is parked on it."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        drive.feed(RunOpened(at=drive.now, config=configured(switch_threshold_ratio=0.8)))
        drive.depth(1, 26)
        assert drive.decide(Point.WAITING).threshold == THRESHOLD
        assert drive.decide(Point.WAITING).action is Action.RECLAIM
        drive.begin(2)
        drive.depth(2, 26)
        assert drive.decide(Point.WAITING).threshold == 51
        assert drive.decide(Point.WAITING).action is Action.KEEP

    @pytest.mark.parametrize(
        ("in_flight", "credits", "action"),
        [(15, 0, Action.RECLAIM), (16, 0, Action.KEEP), (15, 1, Action.KEEP), (0, 16, Action.KEEP)],
    )
    def test_waiting_gives_up_when_the_supply_falls_short(
        self, name: str, in_flight: int, credits: int, action: Action
    ) -> None:
        """Ten groups are there; what is in flight or still owed must make up the rest, or the run waits for ever."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        drive.depth(1, 10, in_flight=in_flight, unpaid_credits=credits)
        decision = drive.decide(Point.WAITING)
        assert decision.action is action
        assert decision.numbers["reachable_count"] == 10 + in_flight + credits
        assert ("useless" in decision.reason) == (action is Action.RECLAIM)

    def test_step_begin_does_not_give_up(self, name: str) -> None:
        """The step's own prompts are added after its begin, so a small supply then proves nothing."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        drive.depth(1, 0, in_flight=0)
        assert drive.decide(Point.STEP_BEGIN).action is Action.KEEP

    @pytest.mark.parametrize("point", [Point.STEP_BEGIN, Point.WAITING])
    def test_nothing_is_reclaimed_that_is_not_lent(self, name: str, point: Point) -> None:
        """A reclaim in TRAINER mode would abort nothing but cost a round of calls, and enter the window as cheap."""
        drive = Drive(name, configured())
        drive.lend_done(counted=False)
        drive.reclaim_done()
        drive.begin(1)
        drive.depth(1, 64)
        decision = drive.decide(point)
        assert decision.action is Action.KEEP
        assert decision.threshold == THRESHOLD

    def test_sample_begin_keeps(self, name: str) -> None:
        """verl lends at a step's end only."""
        drive = Drive(name, configured())
        drive.begin(1)
        drive.ask(1, 0, 0)
        assert drive.decide(Point.SAMPLE_BEGIN).action is Action.KEEP

    def test_depth_of_another_step_is_refused(self, name: str) -> None:
        """Eviction depends on the step, so a depth counted for another one is another number."""
        drive = Drive(name, configured())
        drive.lend_done()
        with pytest.raises(EventOrderError, match="no step is open"):
            drive.decide(Point.WAITING)
        drive.begin(2)
        with pytest.raises(EventOrderError, match="depth of step 2"):
            drive.decide(Point.STEP_BEGIN)
        drive.depth(1, 64)
        with pytest.raises(EventOrderError, match="depth of step 2"):
            drive.decide(Point.STEP_BEGIN)

    @pytest.mark.parametrize("point", list(Point))
    def test_switching_off_makes_it_behave_as_off(self, name: str, point: Point) -> None:
        """A run with enable_switch=false still starts lent, and must get its GPUs back without a threshold."""
        off = Drive("off", configured())
        drive = Drive(name, configured(enable_switch=False))
        for each in (off, drive):
            each.lend_done(counted=False)
            assert each.decide(Point.STEP_BEGIN).action is Action.RECLAIM
            each.begin(1)
        assert drive.decide(point) == off.decide(point)
        for each in (off, drive):
            each.reclaim_done()
        assert drive.decide(point) == off.decide(point)

    def test_switching_off_while_lent_reclaims_at_once(self, name: str) -> None:
        """An operator who turns switching off expects the GPUs back, not at the next threshold."""
        drive = Drive(name, configured())
        drive.lend_done()
        drive.begin(1)
        drive.depth(1, 0)
        assert drive.decide(Point.WAITING).action is Action.KEEP
        drive.feed(RunOpened(at=drive.now, config=configured(enable_switch=False)))
        assert drive.decide(Point.WAITING).action is Action.RECLAIM

    def test_events_of_no_interest_change_no_answer(self, name: str) -> None:
        """Progress, counters and topology are for other policies; verl's scaling rests on configured GPUs."""
        plain, noisy = Drive(name, configured()), Drive(name, configured())
        key = RequestKey("g", 0)
        for drive in (plain, noisy):
            drive.lend_done()
            drive.reclaim_done()
        state = RequestState(key=key, tokens=900, replica="h0", pool=Pool.HYBRID)
        for event in (
            GroupsAdded(at=3, step=1, groups=(NewGroup(group="g", size=8),)),
            RequestProgress(at=3, requests=(state,), covered_share=1.0),
            GroupFinished(at=3, group="g", lengths=(900,) * 8, pool=Pool.HYBRID),
            ReplicaCounters(at=3, replica="h0", pool=Pool.HYBRID, decoded_tokens=1, running_requests=1),
            MiniBatchBegan(at=3, step=1, mini_batch=0),
            MiniBatchEnded(at=3, step=1, mini_batch=0, tokens=10),
            SyncDone(at=3, cost_s=18.0),
            TopologyChanged(at=3, hybrid_gpus=0, standalone_gpus=0, hybrid_replicas=0, standalone_replicas=0),
        ):
            noisy.feed(event)
        assert noisy.step(1, wait_s=48.0, missing=16) == plain.step(1, wait_s=48.0, missing=16)


class TestOff:
    """`off` at every point."""

    @pytest.mark.parametrize(
        ("point", "lent"),
        [
            (Point.STEP_BEGIN, Action.RECLAIM),
            (Point.WAITING, Action.RECLAIM),
            (Point.SAMPLE_BEGIN, Action.KEEP),
            (Point.STEP_END, Action.KEEP),
        ],
    )
    def test_off_takes_back_and_never_lends(self, point: Point, lent: Action) -> None:
        """The run starts lent and validation lends; without this the trainer would train on GPUs that generate."""
        drive = Drive("off", configured())
        assert drive.decide(point).action is Action.KEEP
        drive.lend_done(counted=False)
        assert drive.decide(point).action is lent
        drive.reclaim_done()
        assert drive.decide(point).action is Action.KEEP

    def test_off_needs_no_depth(self) -> None:
        """A buffer that cannot wait on depth is allowed while switching is off."""
        drive = Drive("off", configured())
        drive.lend_done()
        drive.begin(1)
        assert not any(isinstance(event, DepthObserved) for event in drive.events)
        assert drive.decide(Point.STEP_BEGIN).action is Action.RECLAIM
