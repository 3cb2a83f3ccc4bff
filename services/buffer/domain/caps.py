"""Caps: bounds on what a run may hold and ask.

Invariant: every refusal names the cap, its limit and what counts against it now.
"""

from dataclasses import dataclass

from services.runtime.errors import TurnoutError, resource_exhausted


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds of a run: groups, bytes by declared size, parked calls, requests per wall second (None: no bound)."""

    max_groups: int = 1_000_000
    max_bytes: int = 1 << 40
    max_parked_waits: int = 10_000
    max_request_rate: float | None = None


def cap_reached(
    cap: str,
    reason: str,
    message: str,
    *,
    limit: object,
    present: object,
    retry_after: float | None = None,
    **metadata: object,
) -> TurnoutError:
    """RESOURCE_EXHAUSTED because of the field `cap` of Caps."""
    error = resource_exhausted(reason, message, **metadata, cap=cap, limit=limit, present=present)
    error.retry_after = retry_after
    return error
