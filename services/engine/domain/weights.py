"""Weight transactions: which replicas get which version, in which waves.

Invariants: a replica is in at most one open transaction (its own state machine sees to that); waves open one after the
other; a transaction is complete when no replica is left in the present wave and no wave is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.engine.domain.kept import UpdateKind
from services.runtime.errors import failed_precondition, invalid_argument, not_found

CLOSED_KEPT: Final = 100
"""Closed transactions remembered, since vacated GPUs may be reported after the commit."""


@dataclass(slots=True)
class Update:
    """One transaction. `blackout` is in domain seconds.

    `opened` is the present wave as it opened, `wave` what is left of it. `started` are the replicas whose engines this
    very controller has told of it; `answered` says that its id left the controller, without which nobody can end it.
    """

    update_id: str
    kind: UpdateKind
    version: int
    adapter: bool = False
    keep_requests: bool = False
    allow_older: bool = False
    wave_index: int = -1
    opened: frozenset[str] = frozenset()
    wave: set[str] = field(default_factory=set)
    later: list[tuple[str, ...]] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    blackout: float = 0.0
    tokens_recomputed: int = 0
    closed: bool = False
    aborted: bool = False
    answered: bool = False
    started: set[str] = field(default_factory=set)

    @property
    def remaining(self) -> list[str]:
        """Replicas of later waves, by id."""
        return sorted(member for wave in self.later for member in wave)

    def next_wave(self) -> tuple[str, ...]:
        """Take the next wave, if the present one is through; empty if there is none."""
        if self.wave or not self.later:
            return ()
        wave = self.later.pop(0)
        self.wave = set(wave)
        self.opened = frozenset(wave)
        self.wave_index += 1
        return wave

    def require_wave(self, index: int) -> None:
        """Refuse calls for another wave than the open one, with FAILED_PRECONDITION / WAVE_NOT_OPEN."""
        if index != self.wave_index:
            raise failed_precondition(
                "WAVE_NOT_OPEN",
                f"wave {self.wave_index} of {self.update_id!r} is open, not {index}",
                field="wave_index",
                value=index,
                current=self.wave_index,
            )

    def leave_out(self, replica_id: str) -> None:
        """The replica did not get ready: it is no part of the wave."""
        self.drop(replica_id)
        self.opened -= {replica_id}

    def drop(self, replica_id: str) -> None:
        """The replica is not in the transaction any more: done, or taken away."""
        self.wave.discard(replica_id)
        self.later = [rest for wave in self.later if (rest := tuple(m for m in wave if m != replica_id))]

    @property
    def complete(self) -> bool:
        return not self.wave and not self.later


def split_waves(replica_ids: Sequence[str], staggered: bool) -> list[tuple[str, ...]]:
    """One wave, or two halves so that some replicas decode all the time."""
    ordered = tuple(sorted(replica_ids))
    if not staggered or len(ordered) < 2:
        return [ordered]
    half = (len(ordered) + 1) // 2
    return [ordered[:half], ordered[half:]]


class Updates:
    """The open transactions and the last closed ones."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Update] = OrderedDict()

    def add(self, update: Update) -> None:
        """Remember a transaction that has just opened."""
        update.members = update.wave | set(update.remaining)
        self._known[update.update_id] = update
        self._trim()

    def restore(self, updates: Iterable[Update]) -> None:
        """Go on with what an earlier controller knew, oldest first."""
        for update in updates:
            self._known[update.update_id] = update
        self._trim()

    @property
    def all(self) -> Iterable[Update]:
        """Those that are remembered, oldest first."""
        return self._known.values()

    def _trim(self) -> None:
        closed = [key for key, known in self._known.items() if known.closed]
        for key in closed[: max(0, len(closed) - CLOSED_KEPT)]:
            del self._known[key]

    @property
    def open(self) -> list[Update]:
        """The open ones, oldest first."""
        return [update for update in self._known.values() if not update.closed]

    def open_one(self, update_id: str) -> Update | None:
        """The transaction if it is known and open."""
        found = self._known.get(update_id)
        return None if found is None or found.closed else found

    def is_open(self, update_id: str) -> bool:
        """Whether a transaction is known and open."""
        return self.open_one(update_id) is not None

    def find(self, update_id: str) -> Update:
        """The transaction, open or closed, or NOT_FOUND / UPDATE_UNKNOWN."""
        found = self._known.get(update_id)
        if found is None:
            raise not_found("UPDATE_UNKNOWN", f"no weight update {update_id!r}", update_id=update_id)
        return found

    def require_open(self, update_id: str) -> Update:
        """The transaction, or FAILED_PRECONDITION / UPDATE_CLOSED if it is over."""
        found = self.find(update_id)
        if found.closed:
            raise failed_precondition("UPDATE_CLOSED", f"weight update {update_id!r} is closed", update_id=update_id)
        return found


def require_members(update: Update, replica_ids: Iterable[str], field_name: str) -> None:
    """Refuse replicas that are not in the present wave."""
    for replica_id in replica_ids:
        if replica_id not in update.opened:
            raise invalid_argument(
                field_name,
                f"{replica_id!r} is not in the present wave of {update.update_id!r}",
                value=replica_id,
                reason="NOT_IN_WAVE",
            )
