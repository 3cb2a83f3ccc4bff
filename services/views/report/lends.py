"""What each lend cost and what it brought; pure.

Invariants: tokens on lent GPUs are counted from the last reading before the lend, as asleep they decode nothing, to the
last before the next one; a replica that restarted counts from zero again, and its lost count is left out.

Formula: the net seconds of a lend are the time that the standalone replicas alone would have needed for the tokens
decoded on lent GPUs, at their own speed during that lend, less the seconds in which the switch kept the trainer. They
are an upper bound of what the job gained: a token that nobody waited for gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.views.run_state import mode_name
from turnout.scheduler.v1 import events_pb2

_KINDS = {
    events_pb2.LEND_KIND_INIT: "at the start",
    events_pb2.LEND_KIND_STEP_END: "at a step's end",
    events_pb2.LEND_KIND_WITHIN_STEP: "within a step",
    events_pb2.LEND_KIND_VALIDATION: "for validation",
}


@dataclass(slots=True)
class _Pool:
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def read(self, replica_id: str, tokens: int) -> None:
        before = self.last.get(replica_id, self.first.get(replica_id))
        if before is None or tokens < before:
            self.first[replica_id] = 0 if before is not None else tokens
        self.last[replica_id] = tokens

    @property
    def tokens(self) -> int:
        return sum(last - self.first[name] for name, last in self.last.items())


@dataclass(slots=True)
class Lend:
    """served_at: when the replicas began to serve. back_at: when the trainer was sure of its GPUs, None while lent.
    delivered: tokens of trajectories that ended on lent GPUs. first_read, last_read: the readings that the speed of the
    standalone replicas is taken from.
    settled: the scheduler's own account, once it told."""

    lend_id: str
    kind: str
    served_at: float
    cost_s: float
    back_at: float | None = None
    reclaim_s: float = 0.0
    ordered_back_at: float | None = None
    delivered: int = 0
    hybrid: _Pool = field(default_factory=_Pool)
    standalone: _Pool = field(default_factory=_Pool)
    first_read: float | None = None
    last_read: float | None = None
    settled: events_pb2.LendGoodput | None = None

    @property
    def decoded(self) -> int:
        """Tokens decoded on lent GPUs."""
        return self.hybrid.tokens

    @property
    def gained_s(self) -> float | None:
        """Seconds gained against the wait that was predicted without the lend, lost if negative; None if unknown."""
        settled = self.settled
        return settled.gained_seconds if settled is not None and settled.HasField("gained_seconds") else None

    @property
    def served_s(self) -> float | None:
        """Seconds between serving and the order to come back."""
        return None if self.ordered_back_at is None else max(self.ordered_back_at - self.served_at, 0.0)

    @property
    def switch_s(self) -> float:
        """Seconds of switching, both ways."""
        return self.cost_s + self.reclaim_s

    @property
    def net_s(self) -> float | None:
        """See the module; None where the standalone replicas' speed is not known."""
        read_s = (self.last_read or 0.0) - (self.first_read or 0.0)
        alone = self.standalone.tokens
        if read_s <= 0 or alone <= 0:
            return None
        return self.decoded / (alone / read_s) - self.switch_s


class Lends:
    """Feed it every event, in order."""

    def __init__(self) -> None:
        self.all: list[Lend] = []
        self._latest: events_pb2.ReplicaCounters | None = None
        self._latest_at: float | None = None

    @property
    def _open(self) -> Lend | None:
        return self.all[-1] if self.all and self.all[-1].back_at is None else None

    def fold(self, event: events_pb2.RunEvent) -> None:
        """Take in one event."""
        lend = self._open
        match event.WhichOneof("event"):
            case "lend_done":
                self._begin(event.at, event.lend_done)
            case "reclaim_done" if lend is not None:
                lend.back_at, lend.reclaim_s = event.at, event.reclaim_done.cost_seconds
                if lend.ordered_back_at is None:
                    lend.ordered_back_at = event.at - lend.reclaim_s
            case "lend_goodput":
                self._settle(event.lend_goodput)
            case "mode_changed" if lend is not None and mode_name(event.mode_changed.to) == "RECLAIMING":
                lend.ordered_back_at = event.at
            case "replica_counters":
                self._latest, self._latest_at = event.replica_counters, event.at
                if self.all:
                    self._read(self.all[-1])
            case "trajectory_finished" if lend is not None and event.trajectory_finished.on_hybrid:
                lend.delivered += event.trajectory_finished.length
            case _:
                return

    def _begin(self, at: float, done: events_pb2.LendDone) -> None:
        lend = Lend(done.lend_id, _KINDS.get(done.kind, "unknown"), at, done.cost_seconds, first_read=self._latest_at)
        for reading in self._latest.replicas if self._latest is not None else ():
            if reading.HasField("hybrid"):
                (lend.hybrid if reading.hybrid else lend.standalone).first[reading.replica_id] = reading.decoded_tokens
        self.all.append(lend)

    def _settle(self, told: events_pb2.LendGoodput) -> None:
        for lend in reversed(self.all):
            if lend.lend_id == told.lend_id:
                lend.settled = told
                break

    def _read(self, lend: Lend) -> None:
        assert self._latest is not None
        # Speeds are those during the lend; of one too short for a reading, those until the next.
        speeds = lend.ordered_back_at is None or lend.last_read is None
        for reading in self._latest.replicas:
            if reading.hybrid:
                lend.hybrid.read(reading.replica_id, reading.decoded_tokens)
            elif speeds and reading.HasField("hybrid"):
                lend.standalone.read(reading.replica_id, reading.decoded_tokens)
        if speeds:
            lend.first_read = self._latest_at if lend.first_read is None else lend.first_read
            lend.last_read = self._latest_at
