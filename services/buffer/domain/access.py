"""Access: who may read which payloads.

Invariants: a sample lease opens what its groups hold, until it ends or, committed, until its payloads go; a claim opens
the prompt and the kept output of its trajectories.
"""

from collections.abc import Sequence

from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.group import kept_payloads
from services.buffer.domain.leases import LeaseState
from services.buffer.domain.outputs import Payload
from services.buffer.domain.run import Run
from services.runtime.errors import invalid_argument, permission_denied


def of_lease(run: Run, lease_id: str) -> list[Payload]:
    """What a sample lease opens. Raises NOT_FOUND or FAILED_PRECONDITION if it opens nothing any more."""
    lease = run.state.leases.require(lease_id)
    if not (lease.state is LeaseState.COMMITTED and lease.groups):
        run.state.leases.require_live(lease_id)
    return lease.payloads()


def of_claim(run: Run, token: ClaimToken) -> list[Payload]:
    """What a claim opens. Raises FAILED_PRECONDITION / STALE_CLAIM."""
    claim = run.state.claims.require(token)
    opened = [claim.group.prompt] if claim.group.prompt is not None else []
    for index in claim.open:
        opened += kept_payloads(claim.group.trajectories[index].partial)
    return opened


def check_readable(run: Run, opened: Sequence[Payload], refs: Sequence[Payload]) -> None:
    """Raise unless every reference is one of the own store, right, and opened."""
    ids = {payload.id for payload in opened if not payload.store}
    for position, ref in enumerate(refs):
        field = f"refs[{position}]"
        if ref.store:
            message = f"the bytes are in the store {ref.store!r}, to be read there"
            raise invalid_argument(f"{field}.store", message, value=ref.store, reason="EXTERNAL_PAYLOAD")
        run.state.payloads.check(field, ref)
        if ref.id not in ids:
            message = "the payload is not of a group of this lease or claim"
            raise permission_denied("PAYLOAD_NOT_IN_LEASE", message, field=f"{field}.id", value=ref.id)
