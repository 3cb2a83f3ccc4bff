"""The `jit` policy: lend when the predicted rest of the next step is cheaper with the GPUs lent for the best while, take
them back when waiting longer would not make the step end sooner.

Invariants: a prediction rests on the last reading of running requests and on what happened until then; below full
coverage `verl` decides, and the answer says so; deciding changes nothing but a memo of that prediction.
"""

from dataclasses import dataclass

import numpy as np

from services.scheduler.policies.errors import EventOrderError
from services.scheduler.policies.jit.guard import Guard
from services.scheduler.policies.jit.hindsight import Hindsight
from services.scheduler.policies.jit.inflight import Groups, InFlight
from services.scheduler.policies.jit.lengths import Floats, LengthModel
from services.scheduler.policies.jit.outlook import Indices, Outlook, Prospect, Setting
from services.scheduler.policies.jit.rhythm import Rhythm
from services.scheduler.policies.jit.speed import SpeedModel
from services.scheduler.policies.off import OffPolicy
from services.scheduler.policies.types import (
    Action,
    Decision,
    DepthObserved,
    Event,
    GroupFinished,
    GroupsAdded,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    Placement,
    Point,
    PolicyConfig,
    ReclaimDone,
    ReplicaCounters,
    RequestProgress,
    RunOpened,
    StarvationBegan,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SyncDone,
    TopologyChanged,
)
from services.scheduler.policies.verl import VerlPolicy

_COVERAGE = 0.95
_SCENARIOS = 24
# A plan is looked at again at least this often: readings of running requests come about as often.
_RECHECK_S = 10.0
_SOONEST_S = 1.0


@dataclass(frozen=True, slots=True)
class _Forecast:
    at: float
    flight: InFlight
    outlook: Outlook


class JitPolicy:
    """See the package."""

    name = "jit"
    reads_progress = True
    """Readings of running requests change what it answers."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._off = OffPolicy(config)
        self._verl = VerlPolicy(config)
        run = config.run
        self._groups = Groups(run.group_size)
        self._lengths = LengthModel(run.max_response_length, run.train_batch_size)
        self._speed = SpeedModel()
        self._rhythm = Rhythm(config.switch.switch_cost_window_size)
        self._hindsight = Hindsight()
        self._guard = Guard()
        self._awaits_prediction = False
        self._ended_at = 0.0
        self._mini_batch_at = 0.0
        self._hybrids = max(run.hybrid_gpus, 0)
        self._standalones = max(run.standalone_gpus, 1)
        self._depth: DepthObserved | None = None
        self._step: int | None = None
        self._ended: int | None = None
        self._mini_batches_done = 0
        self._sampleable = 0
        self._changes = 0
        self._memo: tuple[int, _Forecast] | None = None

    # ------------------------------------------------------------------------------------------------- events

    def observe(self, event: Event) -> None:
        if self._awaits_prediction and isinstance(event, SyncDone | LendDone | StepBegan):
            self._awaits_prediction = False
            self._predict_step()
        self._verl.observe(event)
        self._off.observe(event)
        self._rhythm.observe(event)
        match event:
            case RunOpened():
                self._config = event.config
                self._rhythm.resize(event.config.switch.switch_cost_window_size)
                self._groups.clear()
                self._changes += 1
            case TopologyChanged():
                self._hybrids, self._standalones = event.hybrid_replicas, max(event.standalone_replicas, 1)
                self._speed.moved(event.at, 0.0)
                self._changes += 1
            case GroupsAdded():
                self._groups.added(event)
                self._changes += 1
            case GroupFinished():
                self._groups.left(event.group)
                if not event.failed:
                    self._lengths.finished(event.lengths)
            case RequestProgress():
                self._groups.progress(event)
                self._changes += 1
            case ReplicaCounters():
                self._speed.counters(event)
            case DepthObserved():
                self._depth = event
                self._sampleable = event.sampleable
            case StarvationBegan():
                self._sampleable = event.sampleable
            case StarvationEnded():
                self._hindsight.waited(event.wait_s)
            case StepBegan():
                self._step = event.step
                self._mini_batches_done = 0
            case MiniBatchBegan():
                self._mini_batches_done = event.mini_batch + 1
                self._mini_batch_at = event.at
            case MiniBatchEnded():
                self._guard.trained(event.at - self._mini_batch_at)
            case StepEnded():
                self._step, self._ended = None, event.step
                self._ended_at = event.at
                self._awaits_prediction = True
                self._hindsight.step_ended()
                self._guard.step_ended(event.at)
            case LendDone() | ReclaimDone() | SyncDone():
                if isinstance(event, LendDone):
                    self._guard.lent()
                if isinstance(event, ReclaimDone):
                    self._predict_wait(event.at - event.cost_s)
                replicas = self._standalones + (self._hybrids if isinstance(event, LendDone) else 0)
                self._speed.moved(event.at, self._groups.tokens / replicas)
                if isinstance(event, ReclaimDone):
                    self._speed.prefilling(event.at - event.cost_s, self._groups.hybrid_tokens, self._standalones)
                self._changes += 1

    # ---------------------------------------------------------------------------------------------- decisions

    def decide(self, point: Point, now: float) -> Decision:
        if not self._config.switch.enable_switch:
            return self._off.decide(point, now)
        if self._groups.read_at is not None and self._groups.coverage < _COVERAGE:
            return self._fall_back(point, now)
        if point is Point.STEP_END:
            return self._step_end(now)
        if point is Point.SAMPLE_BEGIN:
            return self._sample_begin(now)
        return self._within_step(point, now)

    def _fall_back(self, point: Point, now: float) -> Decision:
        decision = self._verl.decide(point, now)
        share = f"{self._groups.coverage:.0%}"
        return Decision(
            action=decision.action,
            reason=f"Only {share} of the running requests are visible, so verl decides: {decision.reason}",
            predicted_wait_s=decision.predicted_wait_s,
            numbers={**decision.numbers, "covered_share": self._groups.coverage},
            threshold=decision.threshold,
        )

    def _within_step(self, point: Point, now: float) -> Decision:
        if self._step is None:
            raise EventOrderError(f"no step is open, so {point.value} cannot be decided")
        if not self._off.lent:
            return Decision(action=Action.KEEP, reason="The GPUs are with the trainer.")
        depth = self._depth_at(self._step)
        run = self._config.run
        missing_batch = run.train_batch_size if point is Point.STEP_BEGIN else 0
        reachable = depth.sampleable + depth.in_flight + depth.unpaid_credits + missing_batch
        numbers = {"sampleable_count": float(depth.sampleable), "reachable_count": float(reachable)}
        if depth.sampleable < run.mini_batch_size:
            if reachable < run.mini_batch_size or depth.in_flight + missing_batch == 0:
                reason = f"{depth.sampleable} groups are sampleable and nothing more can come, so waiting is useless."
                return Decision(action=Action.RECLAIM, reason=reason, numbers=numbers)
            reason = f"{depth.sampleable} groups are sampleable, less than a mini-batch, so the GPUs stay lent."
            return Decision(action=Action.KEEP, reason=reason, numbers=numbers, recheck_at=now + _RECHECK_S)
        if depth.in_flight + missing_batch == 0:
            reason = "Every group has finished, so the GPUs go back to training."
            return Decision(action=Action.RECLAIM, reason=reason, numbers=numbers)
        if not self._lengths.ready or self._groups.read_at is None:
            return self._half_batch(depth.sampleable, numbers)
        return self._weigh_reclaim(depth, missing_batch, numbers, now)

    def _half_batch(self, sampleable: int, numbers: dict[str, float]) -> Decision:
        half = max(self._config.run.train_batch_size // 2, self._config.run.mini_batch_size)
        enough = sampleable >= half
        return Decision(
            action=Action.RECLAIM if enough else Action.KEEP,
            reason=f"{sampleable} groups are sampleable, and until lengths are known the GPUs come back at {half}.",
            numbers=numbers,
            threshold=half,
        )

    def _weigh_reclaim(
        self, depth: DepthObserved, missing_batch: int, numbers: dict[str, float], now: float
    ) -> Decision:
        forecast = self._forecast(missing_batch)
        outlook = forecast.outlook
        x0 = outlook.tokens_after(now - forecast.at, lent=True)
        left = self._config.run.parameter_sync_step - self._mini_batches_done
        alive = self._alive(forecast)
        needed = outlook.needed(alive, depth.sampleable, left, x0)
        best = outlook.flow.lent(needed, 0.0, 0.0, x0)
        numbers |= self._numbers(best, now)
        if best.reclaim_in_s < _SOONEST_S:
            reason = (
                f"Reclaimed at {depth.sampleable} groups: the trainer should wait {max(best.wait_s, 0.0):.0f} s for the "
                "rest of the step, and lending longer would not end it sooner."
            )
            return Decision(action=Action.RECLAIM, reason=reason, predicted_wait_s=max(best.wait_s, 0.0), numbers=numbers)
        return Decision(
            action=Action.KEEP,
            reason=f"{depth.sampleable} groups are sampleable: lending {best.reclaim_in_s:.0f} s longer ends the step sooner.",
            predicted_wait_s=max(best.wait_s, 0.0),
            numbers=numbers,
            recheck_at=now + min(best.reclaim_in_s, _RECHECK_S),
        )

    def _step_end(self, now: float) -> Decision:
        if self._ended is None or self._step is not None:
            raise EventOrderError("no step has ended, so there is no step's end to decide")
        run = self._config.run
        depth = self._depth_at(self._ended + 1)
        if self._ended >= run.total_training_steps:
            return self._no_lend(f"Step {self._ended} is the last, so nothing is lent.", {}, None)
        if not self._lengths.ready or self._groups.read_at is None:
            lend = depth.sampleable < run.train_batch_size
            reason = f"{depth.sampleable} groups are sampleable and no lengths are known, so a lend is "
            return Decision(
                action=Action.LEND if lend else Action.KEEP,
                reason=reason + ("tried." if lend else "not needed."),
                numbers={"should_switch_to_rollout": float(lend), "sampleable_count": float(depth.sampleable)},
            )
        alone, lent, placement = self._step_options(depth)
        numbers = {"sampleable_count": float(depth.sampleable)}
        gain = alone.cost_s - lent.foreseen_s + self._guard.correction_s
        numbers |= {
            "gain_seconds": gain,
            "gain_correction_seconds": self._guard.correction_s,
            "wait_alone_seconds": alone.wait_s,
            "wait_lent_seconds": lent.wait_s,
            "lend_for_seconds": lent.reclaim_in_s,
        } | self._numbers(lent, now)
        if gain <= 0:
            reason = f"The next step should wait {max(alone.wait_s, 0.0):.0f} s for rollouts, and lending would cost more."
            return self._no_lend(reason, numbers, max(alone.wait_s, 0.0))
        return Decision(
            action=Action.LEND,
            reason=f"The next step would wait {alone.wait_s:.0f} s for rollouts; lending for "
            f"{lent.reclaim_in_s:.0f} s saves {gain:.0f} s.",
            placement=placement,
            predicted_wait_s=max(lent.wait_s, 0.0),
            numbers=numbers | {"should_switch_to_rollout": 1.0},
        )

    def _no_lend(self, reason: str, numbers: dict[str, float], wait_s: float | None) -> Decision:
        return Decision(
            action=Action.KEEP,
            reason=reason,
            predicted_wait_s=wait_s,
            numbers=numbers | {"should_switch_to_rollout": 0.0},
        )

    def _sample_begin(self, now: float) -> Decision:
        run = self._config.run
        if not run.reinstall_within_step:
            return Decision(action=Action.KEEP, reason="The trainer cannot install weights within a step.")
        if self._off.lent or self._sampleable >= run.mini_batch_size:
            return Decision(action=Action.KEEP, reason=f"{self._sampleable} groups are sampleable, enough to train on.")
        if not self._lengths.ready or self._groups.read_at is None or not len(self._groups):
            return Decision(action=Action.KEEP, reason="Nothing is known of what runs, so nothing is lent.")
        forecast = self._forecast(0)
        outlook = forecast.outlook
        x0 = outlook.tokens_after(now - forecast.at, lent=False)
        left = run.parameter_sync_step - self._mini_batches_done
        needed = outlook.needed(self._alive(forecast), self._sampleable, left, x0)
        alone = outlook.flow.alone(needed, 0.0, 0.0, x0)
        _, lent, placement = self._options(forecast, needed, 0.0, x0)
        gain = alone.cost_s - lent.foreseen_s + self._guard.correction_s
        numbers = {"gain_seconds": gain, "wait_alone_seconds": alone.wait_s, "wait_lent_seconds": lent.wait_s}
        lend = gain > 0
        return Decision(
            action=Action.LEND if lend else Action.KEEP,
            reason=f"The trainer starves and would wait {alone.wait_s:.0f} s; lending "
            + (f"saves {gain:.0f} s." if lend else "would save nothing."),
            placement=placement if lend else None,
            predicted_wait_s=lent.wait_s if lend else alone.wait_s,
            numbers=numbers | self._numbers(lent, now),
        )

    # ------------------------------------------------------------------------------------------------ details

    def _options(
        self, forecast: _Forecast, needed: Floats, sync_s: float, x0: float = 0.0
    ) -> tuple[Prospect, Prospect, Placement]:
        """Not lending and lending, decided now: `sync_s` passes first, in which nothing decodes."""
        outlook, setting, flight = forecast.outlook, self._setting(), forecast.flight
        tokens = flight.snapshot.tokens
        prefix = float(tokens.sum())
        alone = outlook.flow.alone(needed, sync_s, sync_s + prefix / (setting.prefill * setting.standalones), x0)
        # Longest prefixes stay, so that a reclaim moves few tokens; the next batch fills the hybrids.
        everything = outlook.members
        share = everything * setting.standalones // (setting.standalones + setting.hybrids)
        order = np.argsort(-tokens, kind="stable")
        stay = np.zeros(everything, dtype=np.bool_)
        stay[order[:share]] = True
        on_standalone = float(tokens[order[:share]].sum())
        on_hybrid = prefix - on_standalone
        flow = outlook.placed(~stay)
        stall_standalone = on_standalone / (setting.prefill * setting.standalones)
        stall_hybrid = on_hybrid / (setting.prefill * max(setting.hybrids, 1))
        serving = sync_s + setting.lend_s
        # While the hybrids load weights, the standalone share decodes on.
        ahead = max(setting.lend_s - stall_standalone, 0.0) * setting.standalones
        head_start = outlook.tokens_after(ahead / (setting.standalones + setting.hybrids), lent=True)
        lent = flow.lent(needed, serving, serving + stall_hybrid, x0 + head_start)
        keys = flight.keys
        runs = flight.running
        placement = Placement(
            hybrid=tuple(keys[i] for i in order[share:] if runs[i]),
            standalone=tuple(keys[i] for i in order[:share] if runs[i]),
        )
        return alone, lent, placement

    def _step_options(self, depth: DepthObserved) -> tuple[Prospect, Prospect, Placement]:
        """The next step without and with a lend, when one has just ended."""
        run = self._config.run
        forecast = self._forecast(run.train_batch_size)
        needed = forecast.outlook.needed(self._alive(forecast), depth.sampleable, run.parameter_sync_step, 0.0)
        return self._options(forecast, needed, self._rhythm.sync_s)

    def _predict_step(self) -> None:
        """Remember what is expected of the next step, to learn from it when it ends."""
        depth = self._depth
        known = self._lengths.ready and self._groups.read_at is not None
        if depth is None or self._ended is None or depth.step != self._ended + 1 or not known:
            return
        alone, lent, _ = self._step_options(depth)
        train_s = self._config.run.parameter_sync_step * (self._rhythm.mini_batch_s or 0.0)
        self._guard.predicted(self._ended_at, alone.cost_s, lent.foreseen_s, train_s)

    def _predict_wait(self, reclaimed_at: float) -> None:
        """Remember what the step is expected to wait after a reclaim, to learn from it when the step ends."""
        if self._step is None or not self._lengths.ready or self._groups.read_at is None or not len(self._groups):
            return
        run = self._config.run
        forecast = self._forecast(0)
        outlook = forecast.outlook
        x0 = outlook.tokens_after(max(reclaimed_at - forecast.at, 0.0), lent=True)
        left = run.parameter_sync_step - self._mini_batches_done
        needed = outlook.needed(self._alive(forecast), self._sampleable, left, x0)
        self._hindsight.predicted(outlook.flow.lent(needed, 0.0, 0.0, x0, longest=0.0).wait_s, left * outlook.setting.mini_batch_s)

    def _alive(self, forecast: _Forecast) -> Indices:
        """Which groups of the forecast are still in flight: the fresh ones are its last."""
        names = forecast.flight.names
        known = [index for index, name in enumerate(names) if self._groups.has(name)]
        total = forecast.outlook.completion.shape[0]
        return np.array([*known, *range(len(names), total)], dtype=np.int64)

    def _forecast(self, batch: int) -> _Forecast:
        """Scenarios as of the last reading, with `batch` groups that are still to be added."""
        key = self._changes * 2 + (batch > 0)
        if self._memo is not None and self._memo[0] == key:
            return self._memo[1]
        flight = self._groups.in_flight()
        run = self._config.run
        unseen = 0 if self._depth is None else max(0, self._depth.in_flight - len(self._groups))
        fresh = len(flight.fresh) + batch + unseen
        old, new = self._lengths.draw(flight.snapshot, fresh, run.group_size, _SCENARIOS)
        members = len(old)
        left = np.concatenate([old, new])
        first = np.concatenate([flight.snapshot.first, members + run.group_size * np.arange(fresh)])
        prefix = np.concatenate([flight.snapshot.tokens, np.zeros(len(new))])
        hybrid_share = self._hybrids / (self._hybrids + self._standalones)
        on_hybrid = np.arange(len(new)) < hybrid_share * len(new)
        hybrid = np.concatenate([flight.hybrid, on_hybrid])
        outlook = Outlook(left, first, prefix, hybrid, self._setting())
        forecast = _Forecast(flight.at, flight, outlook)
        self._memo = (key, forecast)
        return forecast

    def _setting(self) -> Setting:
        base, slope = self._speed.line
        run, rhythm = self._config.run, self._rhythm
        return Setting(
            hybrids=self._hybrids,
            standalones=self._standalones,
            base=base,
            slope=slope,
            prefill=self._speed.prefill,
            lend_s=rhythm.lend_s,
            reclaim_s=rhythm.reclaim_s,
            sync_s=rhythm.sync_s,
            mini_batches=run.parameter_sync_step,
            mini_batch=run.mini_batch_size,
            mini_batch_s=rhythm.mini_batch_s or 0.0,
            stretch=self._hindsight.stretch,
        )

    def _numbers(self, prospect: Prospect, now: float) -> dict[str, float]:
        base, slope = self._speed.line
        return {
            "predicted_wait_seconds": prospect.wait_s,
            "reclaim_in_seconds": prospect.reclaim_in_s,
            "decode_base_seconds": base,
            "decode_slope_seconds": slope,
            "prefill_tokens_per_second": self._speed.prefill,
            "arrival_stretch": self._hindsight.stretch,
            "covered_share": self._groups.coverage,
        } | self._rhythm.numbers(now)

    def _depth_at(self, step: int) -> DepthObserved:
        if self._depth is None or self._depth.step != step:
            raise EventOrderError(f"the depth of step {step} was not observed; the last one is {self._depth}")
        return self._depth



