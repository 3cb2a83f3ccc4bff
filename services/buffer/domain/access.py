"""Access: who may read which payloads.

Invariants: a sample lease opens what its groups hold, until it ends or, committed, until its payloads go; a claim opens
the prompt and the kept output of its trajectories.
"""

from collections.abc import Container, Sequence

from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.leases import Lease, LeaseState
from services.buffer.domain.outputs import Payload
from services.buffer.domain.run import Run
from services.runtime.errors import TurnoutError, invalid_argument, permission_denied


def of_lease(run: Run, lease_id: str) -> Lease:
    """A sample lease that opens payloads. Raises NOT_FOUND or FAILED_PRECONDITION if it opens nothing any more."""
    lease = run.state.leases.require(lease_id)
    if not (lease.state is LeaseState.COMMITTED and lease.groups):
        run.state.leases.require_live(lease_id)
    return lease


def of_claim(run: Run, token: ClaimToken) -> list[Payload]:
    """What a claim opens. Raises FAILED_PRECONDITION / STALE_CLAIM."""
    claim = run.state.claims.require(token)
    opened = [claim.group.prompt] if claim.group.prompt is not None else []
    for index in claim.open:
        partial = claim.group.members[index].partial
        if partial is not None:
            opened += partial.kept()
    return opened


def check_readable(run: Run, opened: Sequence[Payload], refs: Sequence[Payload], found: Container[str] = ()) -> None:
    """Raise unless every reference is one of the own store, right, and opened; those `found` already are."""
    ids = {payload.id for payload in opened if not payload.store}
    for position, ref in enumerate(refs):
        field = f"refs[{position}]"
        if ref.store:
            message = f"the bytes are in the store {ref.store!r}, to be read there"
            raise invalid_argument(f"{field}.store", message, value=ref.store, reason="EXTERNAL_PAYLOAD")
        if ref.id in found:
            continue
        run.state.payloads.check(field, ref)
        if ref.id not in ids:
            raise not_opened(field, ref)


def not_opened(field: str, ref: Payload) -> TurnoutError:
    """The lease or claim does not open this payload."""
    message = "the payload is not of a group of this lease or claim"
    return permission_denied("PAYLOAD_NOT_IN_LEASE", message, field=f"{field}.id", value=ref.id)
