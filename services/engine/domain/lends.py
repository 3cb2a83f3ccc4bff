"""The lend of a run: which hybrid replicas are away from the trainer, and under which id.

Invariants: at most one lend is open; a lend id that was closed (reclaimed or aborted, begun or not) never opens again,
so a BeginLend that arrives late cannot take the trainer's GPUs; while replicas are being reclaimed none of them can be
lent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.runtime.errors import aborted, failed_precondition, not_found

CLOSED_KEPT: Final = 1000
"""Closed lend ids that are remembered: a late call comes within seconds, lends last minutes."""


class LendState(Enum):
    """How far a lend is."""

    OPEN = "open"
    RECLAIMED = "reclaimed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Lend:
    """A lend. `members` are those of an open one, or those that an aborted one had."""

    lend_id: str
    state: LendState
    members: tuple[str, ...] = ()


class Lends:
    """The open lend and the ids of closed ones."""

    def __init__(self) -> None:
        self.lend_id = ""
        self.members: tuple[str, ...] = ()
        self._closed: OrderedDict[str, Lend] = OrderedDict()
        self._reclaiming: dict[str, int] = {}

    def begin(self, lend_id: str, members: Iterable[str]) -> tuple[str, ...]:
        """Open the lend, or join it if it is open already; returns its members."""
        self._refuse_closed(lend_id)
        if self.lend_id == lend_id:
            return self.members
        if self.lend_id:
            raise failed_precondition("LEND_OPEN", f"lend {self.lend_id!r} is open", lend_id=self.lend_id)
        chosen = tuple(sorted(members))
        busy = next((member for member in chosen if member in self._reclaiming), None)
        if busy is not None:
            raise aborted("RECLAIM_UNDER_WAY", f"{busy} is being reclaimed: lend it afterwards", replica_id=busy)
        if not chosen:
            raise failed_precondition("NO_REPLICA", "there is no healthy hybrid replica to lend", field="replica_ids")
        self.lend_id, self.members = lend_id, chosen
        return chosen

    def require_open(self, lend_id: str) -> tuple[str, ...]:
        """The members of the open lend of this id."""
        self._refuse_closed(lend_id)
        if self.lend_id != lend_id:
            raise not_found("LEND_UNKNOWN", f"no lend {lend_id!r}", field="lend_id", value=lend_id)
        return self.members

    def join(self, replica_id: str) -> str:
        """A hybrid replica has registered: it joins the open lend. Returns its id, empty if there is none."""
        if self.lend_id:
            self.members = tuple(sorted({*self.members, replica_id}))
        return self.lend_id

    def abort(self, lend_id: str) -> tuple[str, ...]:
        """Close the lend of this id; returns the replicas to free. Again: those that are in no other lend.

        One that is not known may still be on its way: it is closed as well.
        """
        closed = self._closed.get(lend_id)
        if closed is None and lend_id != self.lend_id:
            self._remember(Lend(lend_id, LendState.ABORTED))
            return ()
        if closed is not None and closed.state is LendState.ABORTED:
            return tuple(member for member in closed.members if member not in self.members)
        members = self.require_open(lend_id)
        self._remember(Lend(lend_id, LendState.ABORTED, members))
        self.lend_id, self.members = "", ()
        return members

    def reclaim(self, members: Iterable[str]) -> None:
        """These replicas are being taken back; a lend without members is closed."""
        for member in members:
            self._reclaiming[member] = self._reclaiming.get(member, 0) + 1
        self.drop(members)

    def reclaimed(self, members: Iterable[str]) -> None:
        """The attempt to take them back is over."""
        for member in members:
            self._reclaiming[member] -= 1
            if not self._reclaiming[member]:
                del self._reclaiming[member]

    def drop(self, members: Iterable[str]) -> None:
        """These replicas take no part any more."""
        if self.lend_id:
            gone = set(members)
            self.members = tuple(member for member in self.members if member not in gone)
            if not self.members:
                self._remember(Lend(self.lend_id, LendState.RECLAIMED))
                self.lend_id = ""

    def get(self, lend_id: str) -> Lend:
        """What is known of a lend that is open or was closed."""
        if lend_id == self.lend_id:
            return Lend(lend_id, LendState.OPEN, self.members)
        return self._closed[lend_id]

    @property
    def all(self) -> Iterator[Lend]:
        """What is known: the closed ones, oldest first, and the open one."""
        yield from self._closed.values()
        if self.lend_id:
            yield self.get(self.lend_id)

    def restore(self, lends: Iterable[Lend]) -> None:
        """Go on with what an earlier controller knew, as `all` gave it."""
        for lend in lends:
            if lend.state is LendState.OPEN:
                self.lend_id, self.members = lend.lend_id, lend.members
            else:
                self._remember(lend)

    def _remember(self, lend: Lend) -> None:
        self._closed[lend.lend_id] = lend
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)

    def _refuse_closed(self, lend_id: str) -> None:
        if lend_id in self._closed:
            raise failed_precondition(
                "LEND_CLOSED",
                f"lend {lend_id!r} was reclaimed or aborted: use a new id",
                field="lend_id",
                value=lend_id,
            )
