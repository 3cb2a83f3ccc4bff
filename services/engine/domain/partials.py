"""Operations that failed on some replicas, kept for a repeat of the call that began them.

Invariants: one request_id of one call has one content; the newest `KEPT` are remembered, and one that was made good
is not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from services.engine.domain.operations import Operation, Origin
from services.runtime.errors import invalid_argument

KEPT: Final = 1000
"""A trainer repeats a failed call within minutes, and has a handful of them at a time."""


class Partials:
    """Partial operations by call and request_id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Operation] = OrderedDict()

    def find(self, origin: Origin) -> Operation | None:
        """The operation that a repeat goes on with; other content is INVALID_ARGUMENT / REQUEST_ID_REUSED."""
        known = self._kept.get((origin.call, origin.request_id))
        if known is None:
            return None
        assert known.origin is not None
        if known.origin.fingerprint != origin.fingerprint:
            raise invalid_argument(
                "request_id",
                f"this request_id was used before, by {origin.call} with other content",
                value=origin.request_id,
                reason="REQUEST_ID_REUSED",
            )
        return known

    def keep(self, operation: Operation) -> None:
        """Remember an operation that has failures left, forget one that has none."""
        origin = operation.origin
        if origin is None or not origin.request_id:
            return
        key = (origin.call, origin.request_id)
        if not operation.failures:
            self._kept.pop(key, None)
            return
        self._kept[key] = operation
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
