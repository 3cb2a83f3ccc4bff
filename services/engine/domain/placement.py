"""Where requests run: the least loaded replica, or the one that has the session.

Invariants: a load is never negative; a replica that was removed and added again starts at 0, and completions of its
former life change nothing; a session follows its replica only while that one can be used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SESSIONS_KEPT: Final = 100_000
"""Sessions remembered, the least recently used forgotten first: losing one costs a prefix cache hit, nothing else."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place on a replica, held until it is released. `life` tells apart two registrations of one id."""

    replica_id: str
    life: int
    number: int


class Placement:
    """Loads and sticky sessions."""

    def __init__(self) -> None:
        self._tickets: dict[str, set[Ticket]] = {}
        self._lives: dict[str, int] = {}
        self.cleared = 0
        """How often all sessions were forgotten."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._next_life = 1
        self._next_ticket = 1

    def add(self, replica_id: str) -> None:
        """A replica appears, with no load."""
        self._lives[replica_id] = self._next_life
        self._next_life += 1
        self._tickets[replica_id] = set()

    def remove(self, replica_id: str) -> None:
        """A replica disappears with its sessions; its tickets are void."""
        self._lives.pop(replica_id, None)
        self._tickets.pop(replica_id, None)
        self.clear_sessions([replica_id])

    def load(self, replica_id: str) -> int:
        """Requests placed on a replica and not released, 0 for an unknown one."""
        return len(self._tickets.get(replica_id, ()))

    def place(self, usable: Iterable[str], session_id: str = "") -> Ticket | None:
        """Place a request on the least loaded of the usable replicas, the first of equals; None if there is none."""
        candidates = [replica_id for replica_id in usable if replica_id in self._lives]
        if not candidates:
            return None
        chosen = self._sessions.get(session_id) if session_id else None
        if chosen not in candidates:
            chosen = min(candidates, key=self.load)
        if session_id:
            self._sessions[session_id] = chosen
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        ticket = Ticket(chosen, self._lives[chosen], self._next_ticket)
        self._next_ticket += 1
        self._tickets[chosen].add(ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give a place back; a void ticket changes nothing."""
        self._tickets.get(ticket.replica_id, set()).discard(ticket)

    def clear_sessions(self, replica_ids: Iterable[str] | None = None) -> None:
        """Forget the sessions of these replicas; None is all of them."""
        if replica_ids is None:
            self.cleared += 1
            self._sessions.clear()
            return
        gone = set(replica_ids)
        for session_id in [key for key, replica_id in self._sessions.items() if replica_id in gone]:
            del self._sessions[session_id]

    def session_of(self, session_id: str) -> str | None:
        """The replica that a session sticks to."""
        return self._sessions.get(session_id)
