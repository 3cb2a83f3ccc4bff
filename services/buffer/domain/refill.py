"""RefillBook: the prompts that are owed for evicted groups.

Invariants: created = paid + cancelled + unpaid, and unpaid = free + what the claims have left. One eviction creates one
credit. A claim is shown to one wait at a time, keeps its id when it is shown again, and is gone once it is paid. One
wait is shown new claims at most every `SPACING_S`; the credits of the meantime are gathered into one.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.buffer.domain.ids import Ids
from services.runtime.errors import failed_precondition, not_found

# Ended claims remembered, so that declining one late is told from declining one that never was: any that a trainer can
# still have in hand.
_REMEMBER = 10_000


# Domain seconds, far below what a rollout takes. Where whatever comes is evicted on arrival, a trainer that refills at
# once would otherwise go round with the buffer as fast as both can.
SPACING_S = 0.1


@dataclass(slots=True, eq=False)
class RefillClaim:
    """A demand for `unpaid` prompts; `shown_to` is the wait that was told, None once that wait ended."""

    claim_id: str
    unpaid: int
    shown_to: int | None


class RefillBook:
    """Credits and claims of a partition."""

    __slots__ = (
        "_claims",
        "_ended",
        "_orphans",
        "_shown_at",
        "_shown_to",
        "cancelled",
        "created",
        "free",
        "paid",
    )

    def __init__(self) -> None:
        self.free = 0
        self.created = 0
        self.paid = 0
        self.cancelled = 0
        self._claims: dict[str, RefillClaim] = {}
        self._orphans: dict[str, RefillClaim] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        # Waits are numbered from 1.
        self._shown_to = 0
        self._shown_at = -math.inf

    @property
    def unpaid(self) -> int:
        """Credits neither paid nor cancelled."""
        return self.created - self.paid - self.cancelled

    def claims(self) -> list[RefillClaim]:
        """The unpaid claims."""
        return list(self._claims.values())

    def ended(self) -> list[str]:
        """Ids of the claims that are remembered as ended, oldest first."""
        return list(self._ended)

    def restore(self, claims: Iterable[RefillClaim], ended: Iterable[str]) -> None:
        """Enter what `claims` and `ended` gave; nobody is shown any of it."""
        self._claims = {claim.claim_id: claim for claim in claims}
        self._ended = OrderedDict.fromkeys(ended)
        self.forget_all_waits()

    def add(self, credits: int) -> None:
        """Owe more prompts."""
        self.free += credits
        self.created += credits

    def new_claim_at(self, wait: int) -> float:
        """From when on new credits may be shown to this wait."""
        return self._shown_at + SPACING_S if wait == self._shown_to else -math.inf

    def show(self, wait: int, ids: Ids, now: float) -> list[RefillClaim]:
        """What nobody is told of at present, for this wait: claims of ended waits, then one for new credits."""
        shown = list(self._orphans.values())
        self._orphans.clear()
        if self.free and now >= self.new_claim_at(wait):
            self._shown_to, self._shown_at = wait, now
            claim = RefillClaim(ids.make("refill"), self.free, wait)
            self._claims[claim.claim_id] = claim
            self.free = 0
            shown.append(claim)
        for claim in shown:
            claim.shown_to = wait
        return shown

    def forget_wait(self, wait: int) -> bool:
        """The wait ended: what it was shown may be shown to another; returns whether there is anything."""
        orphans = [claim for claim in self._claims.values() if claim.shown_to == wait]
        for claim in orphans:
            claim.shown_to = None
            self._orphans[claim.claim_id] = claim
        return bool(orphans)

    def forget_all_waits(self) -> None:
        """No wait lives any more."""
        for claim in self._claims.values():
            claim.shown_to = None
        self._orphans = dict(self._claims)

    def require(self, claim_id: str) -> RefillClaim:
        """The unpaid claim of that id. Raises NOT_FOUND / REFILL_CLAIM_NOT_FOUND."""
        claim = self._claims.get(claim_id)
        if claim is None:
            raise not_found(
                "REFILL_CLAIM_NOT_FOUND",
                "no such refill claim: it was paid, declined, or never shown",
                field="refill_claim_id",
                value=claim_id,
            )
        return claim

    def check_payment(self, claim_id: str, prompts: int) -> None:
        """Raise unless the claim exists and owes at least that many prompts."""
        claim = self.require(claim_id)
        if prompts > claim.unpaid:
            raise failed_precondition(
                "REFILL_OVERPAID",
                f"the claim asks for {claim.unpaid} more prompts, not {prompts}",
                field="groups",
                refill_claim_id=claim_id,
                unpaid=claim.unpaid,
                value=prompts,
            )

    def pay(self, claim_id: str, prompts: int) -> int:
        """Pay a claim, perhaps in part; returns what it still asks for."""
        self.check_payment(claim_id, prompts)
        claim = self._claims[claim_id]
        claim.unpaid -= prompts
        self.paid += prompts
        if not claim.unpaid:
            self._remove(claim_id)
        return claim.unpaid

    def decline(self, claim_id: str) -> int:
        """Cancel what a claim still asks for; returns how much that was, 0 if it had ended."""
        if claim_id in self._ended:
            return 0
        claim = self.require(claim_id)
        self.cancelled += claim.unpaid
        self._remove(claim_id)
        return claim.unpaid

    def _remove(self, claim_id: str) -> None:
        del self._claims[claim_id]
        self._orphans.pop(claim_id, None)
        self._ended[claim_id] = None
        if len(self._ended) > _REMEMBER:
            self._ended.popitem(last=False)
