"""ClaimBook: which worker holds which trajectories, and until when.

Invariants: a trajectory is in at most one claim; all trajectories of a claim belong to one group and stand at the
claim's attempt; a claim without open trajectories is gone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from services.buffer.domain.deadlines import Deadlines
from services.buffer.domain.group import Group
from services.runtime.errors import TurnoutError, failed_precondition


@dataclass(frozen=True, slots=True)
class ClaimToken:
    """Proof of the right to settle the trajectories of a claim."""

    claim_id: str
    attempt: int


@dataclass(slots=True, eq=False)
class Claim:
    """A share of a group in a worker's hands; `open` are the indices not settled yet."""

    token: ClaimToken
    partition: str
    group: Group
    worker_id: str
    open: set[int]


def stale_claim(token: ClaimToken | None) -> TurnoutError:
    """The token does not give the right it is used for (any more)."""
    if token is None:
        return failed_precondition(
            "STALE_CLAIM", "the trajectory was claimed, so its claim's token is needed", field="token"
        )
    return failed_precondition(
        "STALE_CLAIM",
        "the claim has ended, or its trajectory was re-issued since",
        field="token",
        claim_id=token.claim_id,
        attempt=token.attempt,
    )


class ClaimBook:
    """All claims of a run."""

    __slots__ = ("_claims", "_deadlines")

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    def get(self, claim_id: str) -> Claim | None:
        """The living claim of that id."""
        return self._claims.get(claim_id)

    def open(self, claim: Claim, until: float) -> None:
        """Enter a new claim that lives until `until`."""
        self._claims[claim.token.claim_id] = claim
        self._deadlines.set(claim.token.claim_id, until)

    def require(self, token: ClaimToken) -> Claim:
        """The living claim of a token. Raises FAILED_PRECONDITION / STALE_CLAIM."""
        claim = self._claims.get(token.claim_id)
        if claim is None or claim.token != token:
            raise stale_claim(token)
        return claim

    def renew(self, token: ClaimToken, until: float) -> None:
        """Let a claim live until `until`. Raises FAILED_PRECONDITION / STALE_CLAIM."""
        self._deadlines.set(self.require(token).token.claim_id, until)

    def until(self, claim_id: str) -> float | None:
        """When a claim ends."""
        return self._deadlines.get(claim_id)

    def release(self, claim_id: str, index: int) -> None:
        """One of its trajectories is no longer in the worker's hands."""
        claim = self._claims.get(claim_id)
        if claim is None:
            return
        claim.open.discard(index)
        if not claim.open:
            self.close(claim_id)

    def close(self, claim_id: str) -> None:
        """End a claim, if it lives."""
        self._claims.pop(claim_id, None)
        self._deadlines.discard(claim_id)

    def next_expiry(self) -> float | None:
        """When the first claim ends."""
        return self._deadlines.next()

    def expired(self, now: float, limit: int) -> list[str]:
        """Up to `limit` claims whose time is over, earliest first; they are to be taken out now."""
        return list(islice(self._deadlines.pop_due(now), limit))

    def take(self, claim_ids: Iterable[str]) -> list[Claim]:
        """Remove and return claims."""
        taken = [self._claims.pop(claim_id) for claim_id in claim_ids]
        for claim in taken:
            self._deadlines.discard(claim.token.claim_id)
        return taken

    def restart(self, until: float) -> None:
        """Let every claim live until `until`."""
        for claim_id in self._claims:
            self._deadlines.set(claim_id, until)
