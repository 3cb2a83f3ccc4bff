"""LeaseBook: the batches that Sample handed out.

Invariants: a group is in at most one live lease; a lease ends once, as committed, released or expired; the answer to a
repeated request_id follows from how its lease ended. Ended leases are remembered as long as other first answers are.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.buffer.domain.deadlines import Deadlines
from services.buffer.domain.group import Group
from services.buffer.domain.outputs import Payload
from services.runtime.errors import already_exists, failed_precondition, invalid_argument, not_found

# As for every remembered answer: an hour outlives any client's retries, and the number bounds the memory.
REMEMBER_SECONDS = 3600.0
REMEMBER_LEASES = 100_000


class LeaseState(Enum):
    """How a lease stands."""

    LIVE = 1
    COMMITTED = 2
    RELEASED = 3
    EXPIRED = 4


@dataclass(slots=True, eq=False)
class Lease:
    """A batch. `groups` are let go when neither the groups nor their payloads are needed any more."""

    lease_id: str
    partition: str
    step: int
    groups: Sequence[Group]
    group_ids: tuple[str, ...]
    request_id: str
    fingerprint: bytes
    state: LeaseState = LeaseState.LIVE
    auto_commit: bool = False
    ended_at: float = 0.0

    def payloads(self) -> list[Payload]:
        """Everything its groups hold in a store."""
        return [payload for group in self.groups for payload in group.payloads()]

    def small_bytes(self) -> int:
        """Bytes of payloads that its groups hold themselves."""
        return sum([group.small_bytes for group in self.groups])


class LeaseBook:
    """The leases of a run."""

    __slots__ = ("_by_request", "_ended", "_leases", "deadlines", "live", "retained")

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._ended: OrderedDict[str, Lease] = OrderedDict()
        self.live: dict[str, Lease] = {}
        # When the live leases end, unless their trainer was heard of since.
        self.deadlines = Deadlines()
        # Committed leases whose payloads are still kept, with the time until which they are.
        self.retained = Deadlines()

    def open(self, lease: Lease, until: float) -> None:
        """Enter a new lease that lives until `until`."""
        self.deadlines.set(lease.lease_id, until)
        self._leases[lease.lease_id] = lease
        self.live[lease.lease_id] = lease
        if lease.request_id:
            self._by_request[lease.request_id] = lease

    def require(self, lease_id: str) -> Lease:
        """The lease of that id. Raises NOT_FOUND / LEASE_NOT_FOUND."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise not_found("LEASE_NOT_FOUND", "no such sample lease", field="lease_id", value=lease_id)
        return lease

    def require_live(self, lease_id: str) -> Lease:
        """The living lease of that id. Raises NOT_FOUND, or FAILED_PRECONDITION telling how it ended."""
        lease = self.require(lease_id)
        if lease.state is not LeaseState.LIVE:
            raise failed_precondition(
                f"LEASE_{lease.state.name}",
                f"the lease is {lease.state.name.lower()}",
                field="lease_id",
                value=lease_id,
            )
        return lease

    def answered(self, request_id: str, fingerprint: bytes) -> Lease | None:
        """The lease that this request got, to answer a repeat with; None if the request is new.

        Raises what a repeat gets once the manifest is no longer there.
        """
        lease = self._by_request.get(request_id) if request_id else None
        if lease is None:
            return None
        if lease.fingerprint != fingerprint:
            message = "this request_id was used with other content"
            raise invalid_argument("request_id", message, value=request_id, reason="REQUEST_ID_REUSED")
        if lease.state is LeaseState.LIVE or (lease.auto_commit and lease.groups):
            return lease
        details = {"field": "request_id", "value": request_id, "lease_id": lease.lease_id}
        if lease.state is LeaseState.COMMITTED:
            raise already_exists("ALREADY_COMMITTED", "the groups of this request were committed", **details)
        message = f"the lease of this request is {lease.state.name.lower()}"
        raise failed_precondition(f"LEASE_{lease.state.name}", message, **details)

    def remembered(self) -> list[Lease]:
        """All leases: the living ones, then those that ended, in the order in which they did."""
        return [*self.live.values(), *self._ended.values()]

    def restore(self, leases: Iterable[tuple[Lease, bool]], until: float) -> None:
        """Enter leases as `remembered` gave them, each with whether its payloads are retained."""
        for lease, retained in leases:
            if lease.state is LeaseState.LIVE:
                self.open(lease, until)
                continue
            self._leases[lease.lease_id] = self._ended[lease.lease_id] = lease
            if lease.request_id:
                self._by_request[lease.request_id] = lease
            if retained:
                self.retained.set(lease.lease_id, until)

    def restart(self, until: float) -> None:
        """Let everything that runs out run until `until`."""
        for lease_id in self.live:
            self.deadlines.set(lease_id, until)
        for lease_id in self.retained.names():
            self.retained.set(lease_id, until)

    def end(self, lease: Lease, state: LeaseState, now: float) -> None:
        """A live lease ends; the oldest ended ones are forgotten."""
        lease.state = state
        lease.ended_at = now
        del self.live[lease.lease_id]
        self.deadlines.discard(lease.lease_id)
        self._ended[lease.lease_id] = lease
        while (oldest := next(iter(self._ended.values()))) is not lease:
            recent = len(self._ended) <= REMEMBER_LEASES and oldest.ended_at >= now - REMEMBER_SECONDS
            if recent or self.retained.get(oldest.lease_id) is not None:
                break
            self._forget(oldest)

    def _forget(self, lease: Lease) -> None:
        del self._ended[lease.lease_id]
        del self._leases[lease.lease_id]
        if self._by_request.get(lease.request_id) is lease:
            del self._by_request[lease.request_id]
