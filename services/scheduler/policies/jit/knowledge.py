"""All that the policy knows of the run, and what it makes of it: a forecast of everything in flight.

Invariants: the same events give the same forecast, whatever was asked in between (the memo holds one forecast, of the
last change); without a topology the replicas that report themselves are counted.
"""

from math import inf

from services.scheduler.policies.config import RunConfig
from services.scheduler.policies.jit.forecast import Forecast, forecast
from services.scheduler.policies.jit.hindsight import Hindsight
from services.scheduler.policies.jit.inflight import Groups
from services.scheduler.policies.jit.lengths import LengthModel
from services.scheduler.policies.jit.outlook import Setting
from services.scheduler.policies.jit.rhythm import Rhythm
from services.scheduler.policies.jit.speed import SpeedModel
from services.scheduler.policies.types import (
    DepthObserved,
    Event,
    GroupFinished,
    GroupsAdded,
    LendDone,
    PolicyConfig,
    Pool,
    ReclaimDone,
    ReplicaCounters,
    RequestProgress,
    RunOpened,
    StarvationBegan,
    SyncDone,
    TopologyChanged,
)

# Below, what is not seen decides more than what is.
_COVERAGE = 0.95
# A reclaim takes at most so many times what the last ones took.
_RECLAIM_MARGIN = 2.0


class Knowledge:
    """Feed it every event. `sampleable`: groups that can be sampled, as last observed."""

    def __init__(self, config: PolicyConfig) -> None:
        self.run: RunConfig = config.run
        self.groups = Groups(config.run.group_size)
        self.lengths = LengthModel(config.run.max_response_length, config.run.train_batch_size)
        self.speed = SpeedModel()
        self.rhythm = Rhythm(config.switch.switch_cost_window_size)
        self.hindsight = Hindsight()
        self.depth: DepthObserved | None = None
        self.sampleable = 0
        self._topology: tuple[int, int] | None = None
        self._seen: dict[Pool, set[str]] = {Pool.HYBRID: set(), Pool.STANDALONE: set()}
        self._decoding_from = 0.0
        self._changes = 0
        self._memo: tuple[int, int, Forecast] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is enough to predict with: lengths, and a reading of what runs."""
        return self.lengths.ready and self.groups.read_at is not None

    @property
    def blind(self) -> bool:
        """Whether too little of what runs is visible; so it is too where groups finish and no reading ever came."""
        if self.groups.read_at is None:
            return self.lengths.ready
        return self.groups.coverage < _COVERAGE

    @property
    def hybrids(self) -> int:
        """Hybrid replicas."""
        return self._topology[0] if self._topology else len(self._seen[Pool.HYBRID]) or self.run.hybrid_gpus

    @property
    def standalones(self) -> int:
        """Standalone replicas, at least 1."""
        known = self._topology[1] if self._topology else len(self._seen[Pool.STANDALONE]) or self.run.standalone_gpus
        return max(known, 1)

    @property
    def train_s(self) -> float:
        """Seconds of training a step."""
        return self.run.parameter_sync_step * (self.rhythm.mini_batch_s or 0.0)

    def observe(self, event: Event) -> None:
        """Take note."""
        self.rhythm.observe(event)
        match event:
            case RunOpened():
                self.run = event.config.run
                self.rhythm.resize(event.config.switch.switch_cost_window_size)
                if not event.goes_on:
                    self.groups.clear()
            case TopologyChanged():
                self._topology = (event.hybrid_replicas, event.standalone_replicas)
                self.speed.moved(event.at, 0.0)
            case GroupsAdded():
                self.groups.added(event)
            case GroupFinished():
                self.groups.left(event.group)
                if not event.failed:
                    self.lengths.finished(event.lengths)
                return  # A forecast leaves out what has finished since.
            case RequestProgress():
                self.groups.progress(event)
            case ReplicaCounters():
                self.speed.counters(event)
                self._seen[event.pool].add(event.replica)
                return
            case DepthObserved() | StarvationBegan():
                self.sampleable = event.sampleable
                if isinstance(event, DepthObserved):
                    self.depth = event
                    # It is read before a reclaim is ordered, and again only when that is over.
                    self.speed.undisturbed(event.at)
                return
            case LendDone() | ReclaimDone() | SyncDone():
                self._moved(event)
            case _:
                return
        self._changes += 1

    def forecast(self, batch: int) -> Forecast:
        """Everything in flight as of the last reading, and `batch` groups that are still to be added."""
        if self._memo is None or self._memo[:2] != (self._changes, batch):
            self._memo = (self._changes, batch, self._make(batch))
        return self._memo[2]

    def since_reading(self, now: float) -> float:
        """Seconds in which what the last reading showed went on decoding."""
        if not self.groups.decoding:
            # A batch that is yet to come has not decoded since then.
            return 0.0
        return max(now - max(self.groups.read_at or 0.0, self._decoding_from), 0.0)

    def setting(self) -> Setting:
        """Engines and trainer as they are now."""
        base, slope = self.speed.line
        return Setting(
            hybrids=self.hybrids,
            standalones=self.standalones,
            base=base,
            slope=slope,
            prefill=self.speed.prefill,
            lend_s=self.rhythm.lend_s,
            reclaim_s=self.rhythm.reclaim_s,
            mini_batch=self.run.mini_batch_size,
            mini_batch_s=self.rhythm.mini_batch_s or 0.0,
            stretch=self.hindsight.stretch,
        )

    def numbers(self, now: float) -> dict[str, float]:
        """What predictions rest on, by name."""
        base, slope = self.speed.line
        return {
            "decode_base_seconds": base,
            "decode_slope_seconds": slope,
            "prefill_tokens_per_second": self.speed.prefill,
            "arrival_stretch": self.hindsight.stretch,
            "finished_groups_known": float(self.lengths.finished_groups),
            "covered_share": self.groups.coverage,
            "mini_batch_seconds": self.rhythm.mini_batch_s or 0.0,
        } | self.rhythm.numbers(now)

    def _make(self, batch: int) -> Forecast:
        flight = self.groups.in_flight()
        unseen = 0 if self.depth is None else max(0, self.depth.in_flight - len(self.groups))
        return forecast(flight, len(flight.fresh) + batch + unseen, self.run.group_size, self.lengths, self.setting())

    def _moved(self, event: LendDone | ReclaimDone | SyncDone) -> None:
        """Requests were aborted somewhere, and prefill what they had."""
        self._decoding_from = event.at
        lent = isinstance(event, LendDone)
        replicas = self.standalones + (self.hybrids if lent else 0)
        self.speed.moved(event.at, self.groups.tokens / replicas, event.at - event.cost_s)
        if not isinstance(event, SyncDone):
            # Until one was measured, a reclaim may take any time.
            self.speed.hold_s = (_RECLAIM_MARGIN * self.rhythm.reclaim_s or inf) if lent else 0.0
        if isinstance(event, ReclaimDone):
            self._decoding_from = event.at - event.cost_s
            self.speed.prefilling(event.at - event.cost_s, self.groups.hybrid_tokens, self.standalones)
