"""One training run, as the scheduler keeps it.

Invariants: whatever happens goes through `record`, which logs it and shows it to the policy in one order, so the log
alone reproduces every decision; a changed configuration takes hold when a step begins, never within one.
"""

from dataclasses import dataclass

from services.runtime.errors import stale_epoch, unknown_epoch
from services.scheduler.domain import events
from services.scheduler.domain.calls import CallOrder, Position
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.events import DecisionAction, DecisionPoint, Happening, Mode
from services.scheduler.domain.feed import PolicyFeed
from services.scheduler.domain.goodput import GoodputMeter
from services.scheduler.domain.learner import Learner
from services.scheduler.domain.lease import TrainerLease
from services.scheduler.domain.lends import Lend, Lends
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.modes import Modes
from services.scheduler.domain.resume import Resume
from services.scheduler.domain.sync import Sync
from services.scheduler.domain.timings import StepTimings
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import Decision, Point


@dataclass(frozen=True, slots=True)
class Moment:
    """Now: `now` in domain seconds of the service's clock, `wall` in unix seconds."""

    now: float
    wall: float


@dataclass(frozen=True, slots=True)
class Depth:
    """The buffer's depth at `step`. `held`: a WAIT hold stands, so that nothing can be sampled yet."""

    step: int
    sampleable: int
    in_flight: int
    unpaid_credits: int
    held: bool = False

    @property
    def reachable(self) -> int:
        """Groups that can become sampleable without prompts that nobody has promised."""
        return self.sampleable + self.in_flight + self.unpaid_credits


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint keeps of a run: what the policy learned.

    `knowledge` is None if another version of the program wrote it, which nobody can read.
    """

    step: int
    knowledge: tuple[Policy, PolicyFeed] | None


@dataclass(slots=True)
class Notes:
    """What was noted of the present step, so that a repeat after a failure notes nothing twice.

    announced_step: the last BeginStep. announced_sample: step and number of the last BeginSample. starving: since then.
    reported: the mode as it was recorded last. waiting_action: what the policy answered last within a wait.
    """

    announced_step: int = 0
    announced_sample: tuple[int, int] | None = None
    starving: bool = False
    reported: Mode = Mode.TRAINER
    waiting_action: DecisionAction | None = None


class Run:
    """The state of one run over all its epochs."""

    def __init__(
        self, run_id: str, config: RunConfig, create: PolicyFactory, log: EventLog, scale: float, moment: Moment
    ) -> None:
        """`scale`: wall seconds per domain second, for the trainer's lease, which is wall time."""
        self.run_id = run_id
        self.config = config
        self.epoch = 0
        self.is_open = False
        self.closing = False
        """Whether its trainer said that it ends, so that nothing but that may come; it is open until it has."""
        self.resumed = False
        """Whether the trainer resumed: engines that no update has reached since may hold newer weights than its own."""
        self.opened_wall = moment.wall
        self.modes = Modes()
        self.lends = Lends()
        self.reclaims = 0
        self.served = False
        """Whether hybrids served since the last reclaim, so that taking them back is one."""
        self.unfinished_lend = ""
        """Lend that the controller may hold open, empty if none: taking the GPUs back begins with undoing it."""
        self.timings = StepTimings()
        self.log = log
        self.order = CallOrder(Position(), config.parameter_sync_step)
        self.lease = TrainerLease(config.trainer_lease_s / scale, moment.now)
        self.reclaim_ordered_at: float | None = None
        """When the reclaim that is under way was ordered, None if none is."""
        self.origin = moment.now
        """Where the service's clock stood when the run's own began."""
        self.pending: RunConfig | None = None
        """Configuration that the next step takes over."""
        self.notes = Notes()
        self.threshold: int | None = None
        """Groups at which the policy takes the GPUs back in the present step, None if it named no number."""
        self.learner = Learner(config, create)
        self.goodput = GoodputMeter()
        self._scale = scale

    # --------------------------------------------------------------------------------------------------- life

    @property
    def step(self) -> int:
        """The last step begun."""
        return self.order.position.step

    def at(self, now: float) -> float:
        """The run's own time at `now` of the service's clock."""
        return now - self.origin

    def open(
        self,
        epoch: int,
        config: RunConfig,
        resume: Resume | None,
        moment: Moment,
        saved: SavedState | None = None,
    ) -> None:
        """A trainer begins the run, or takes it over where `resume` says.

        What the policy learned stays, unless `saved` says what the same policy knew at the checkpoint that is resumed.
        """
        if self.lends.open is not None:
            self.abandoned(self.lends.open, "a new trainer took the run over", moment)
        self.epoch = epoch
        self.is_open = True
        self.closing = False
        self.resumed = resume is not None
        self.opened_wall = moment.wall
        step = 0 if resume is None else resume.step
        self.order = CallOrder(Position(step=step), config.parameter_sync_step)
        self.timings = StepTimings()
        self.reclaim_ordered_at = None
        self.notes = Notes(announced_step=step, reported=self.notes.reported, waiting_action=self.notes.waiting_action)
        self.pending = None
        self._adopt(config)
        recall(self.learner, config, saved)
        self.begin_lease(moment)
        checkpoint_id = "" if resume is None else resume.checkpoint_id
        opened = events.RunOpened(epoch, step, config.as_json(), resume is not None, checkpoint_id)
        self.record(opened, moment)

    def close(self, reason: str, moment: Moment) -> None:
        """The run ends. GPUs were taken back before."""
        self.is_open = self.closing = False
        self.record(events.RunClosed(reason), moment)

    def begin_lease(self, moment: Moment) -> None:
        """The trainer's lease begins at its full length."""
        self.lease = TrainerLease(self.config.trainer_lease_s / self._scale, moment.now)

    def check_epoch(self, epoch: int) -> None:
        """Raise FAILED_PRECONDITION unless `epoch` is the present one."""
        if epoch < self.epoch:
            raise stale_epoch(epoch, self.epoch)
        if epoch > self.epoch:
            raise unknown_epoch(epoch, self.epoch)

    def reconfigure(self, config: RunConfig) -> None:
        """Take `config`, already checked, over when the next step begins."""
        self.pending = config

    @property
    def next_config(self) -> RunConfig:
        """The configuration of the next step."""
        return self.pending or self.config

    def _adopt(self, config: RunConfig) -> None:
        self.config = config
        self.learner.adopt(config, self.log)

    # ------------------------------------------------------------------------------------------------- events

    def record(self, event: Happening, moment: Moment) -> None:
        """Log `event` and show it to the policy, and log what a lend brought once that is known."""
        placed = self.log.append(event, self.at(moment.now), moment.wall)
        self.learner.observe(event, placed.at)
        brought = self.goodput.read(event, placed.at)
        if brought is not None:
            self.record(brought, moment)

    def note_mode(self, moment: Moment) -> None:
        """Record the mode if it is another one than recorded last."""
        mode = self.modes.mode
        if mode is not self.notes.reported:
            lend_id = self.lends.open.lend_id if self.lends.open else ""
            before, self.notes.reported = self.notes.reported, mode
            self.record(events.ModeChanged(before, mode, lend_id), moment)

    # -------------------------------------------------------------------------------------------------- steps

    def announced(self, step: int) -> bool:
        """Whether `step` was noted as begun, by a BeginStep that then failed."""
        return self.notes.announced_step == step

    def begin_step(self, step: int, moment: Moment) -> None:
        """BeginStep was called; a repeat after a failure is noted once."""
        if self.announced(step):
            return
        self.notes.announced_step = step
        self.threshold = None
        if self.pending is not None:
            config, self.pending = self.pending, None
            self._adopt(config)
            self.record(events.RunUpdated(config.as_json()), moment)
        self.timings.begin_step()
        self.record(events.StepBegan(step), moment)

    def begin_sample(self, mini_batch: int, depth: Depth, moment: Moment) -> None:
        """The trainer asks for a mini-batch; a repeat after a failure is noted once."""
        self.observe_depth(depth, moment)
        if self.notes.announced_sample == (depth.step, mini_batch):
            return
        self.notes.announced_sample = (depth.step, mini_batch)
        self.record(events.MiniBatchBegan(depth.step, mini_batch, depth.sampleable), moment)
        if depth.sampleable < self.config.mini_batch_size:
            self.notes.starving = True
            self.record(events.StarvationBegan(depth.step), moment)

    def end_sample(self, step: int, mini_batch: int, wait_s: float, tokens: int | None, moment: Moment) -> None:
        """The trainer has its mini-batch after `wait_s`."""
        if self.notes.starving:
            self.notes.starving = False
            self.record(events.StarvationEnded(step, wait_s), moment)
        self.record(events.MiniBatchEnded(step, mini_batch, wait_s, tokens), moment)

    def observe_depth(self, depth: Depth, moment: Moment) -> None:
        """The buffer was read."""
        reading = events.DepthObserved(depth.step, depth.sampleable, depth.in_flight, depth.unpaid_credits)
        self.record(reading, moment)

    # ---------------------------------------------------------------------------------------------- decisions

    def reads_progress(self, point: Point) -> bool:
        """Whether a reading of running requests would change what the policy answers at `point`."""
        if not self.config.switching:
            return False
        asked = point is not Point.SAMPLE_BEGIN or self.config.can_reinstall
        return asked and bool(getattr(self.learner.policy, "reads_progress", False))

    def decide(self, point: Point, step: int, moment: Moment) -> Decision:
        """Ask the policy at `point`.

        A wait asks at every arrival; only its first answer and those that differ from the last are recorded.
        """
        decision = self.learner.decide(point, self.at(moment.now))
        action = DecisionAction[decision.action.name]
        news = point is not Point.WAITING or action is not self.notes.waiting_action
        self.notes.waiting_action = action if point is Point.WAITING else None
        if point is not Point.STEP_END and decision.threshold is not None:
            self.threshold = decision.threshold
        if news:
            made = events.DecisionMade(
                point=DecisionPoint[point.name],
                step=step,
                action=action,
                policy=self.learner.name,
                reason=decision.reason,
                numbers=dict(decision.numbers),
                predicted_wait_seconds=decision.predicted_wait_s,
                threshold=decision.threshold,
                recheck_at=decision.recheck_at,
                placed_on_hybrid=0 if decision.placement is None else len(decision.placement.hybrid),
                placed_on_standalone=0 if decision.placement is None else len(decision.placement.standalone),
            )
            self.record(made, moment)
        return decision

    # ------------------------------------------------------------------------------------------------- moving

    def begin_lend(self, lend: Lend, moment: Moment) -> None:
        """A lend is decided."""
        self.lends.begin(lend)
        self.modes.lending()
        self.note_mode(moment)

    def completed(self, lend: Lend, cost_s: float, moment: Moment) -> None:
        """The hybrids serve."""
        self.lends.complete(cost_s)
        self.served = True
        self.unfinished_lend = ""
        self.modes.serving()
        counted = lend.counted and self.config.switching
        self.record(events.LendDone(lend.lend_id, lend.kind, cost_s, counted), moment)
        self.note_mode(moment)

    def abandoned(self, lend: Lend, reason: str, moment: Moment) -> None:
        """The open lend came to nothing. Where the GPUs are is another matter."""
        self.lends.abandon()
        self.record(events.LendAbandoned(lend.lend_id, reason), moment)

    def reclaiming(self, moment: Moment) -> None:
        """The GPUs are ordered back. An order that a restart of this service cut goes on from when it was given."""
        if self.reclaim_ordered_at is None:
            self.reclaim_ordered_at = moment.now
        self.modes.reclaiming()
        self.note_mode(moment)

    def returned(self, cost_s: float, moment: Moment) -> None:
        """GPUs are confirmed back after `cost_s`. If they served, it was a reclaim; all count while switching is on."""
        self.unfinished_lend = ""
        self.reclaim_ordered_at = None
        if self.served:
            self.served = False
            self.reclaims += 1
            self.timings.reclaimed(cost_s)
            self.record(events.ReclaimDone(cost_s, self.config.switching), moment)
        self.modes.returned()
        self.note_mode(moment)

    def taken_over(self, cost_s: float, moment: Moment) -> None:
        """A new trainer found the GPUs free, or took them back in `cost_s`, which says nothing of reclaims to come."""
        self.unfinished_lend = ""
        if self.served:
            self.served = False
            self.reclaims += 1
            self.record(events.ReclaimDone(cost_s, counted=False), moment)
        self.modes.returned()
        self.note_mode(moment)

    def transition_failed(self, failure: events.TransitionFailed, moment: Moment) -> None:
        """A transition failed; the run stays in between."""
        self.reclaim_ordered_at = None
        self.modes.failed(failure.message)
        self.record(failure, moment)
        self.note_mode(moment)

    def synced(self, sync: Sync, *, hybrid: bool, weight_version: int, moment: Moment) -> None:
        """Weights reached replicas."""
        done = events.SyncDone(hybrid, sync.seconds, weight_version, sync.tokens_recomputed, sync.blackout_seconds)
        self.record(done, moment)

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> SavedState:
        """A copy of what a checkpoint keeps."""
        return SavedState(self.step, self.learner.knowledge())

    @property
    def mode(self) -> Mode:
        """Who has the GPUs."""
        return self.modes.mode

    @property
    def can_lend(self) -> bool:
        """Whether there is something to lend."""
        return self.config.hybrid_gpus > 0


def recall(learner: Learner, config: RunConfig, saved: SavedState | None) -> None:
    """Let a policy that is resumed from a checkpoint know what the same policy knew then."""
    if saved is not None and saved.knowledge is not None and saved.knowledge[0].name == config.policy:
        learner.recall(*saved.knowledge, config)
