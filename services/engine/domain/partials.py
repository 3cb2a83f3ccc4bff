"""Operations that failed on some replicas, kept for a repeat of the call that began them.

Invariants: one request_id of one call has one content; the newest `KEPT` are remembered, and one that was made good
is not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from services.engine.domain.operations import Operation
from services.runtime.errors import invalid_argument

KEPT: Final = 1000
"""A trainer repeats a failed call within minutes, and has a handful of them at a time."""


class Partials:
    """Partial operations by call and request_id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, Operation]] = OrderedDict()

    def find(self, call: str, request_id: str, content: bytes) -> Operation | None:
        """The operation that a repeat goes on with; other content is INVALID_ARGUMENT / REQUEST_ID_REUSED."""
        known = self._kept.get((call, request_id))
        if known is None:
            return None
        if known[0] != content:
            raise invalid_argument(
                "request_id",
                f"this request_id was used before, by {call} with other content",
                value=request_id,
                reason="REQUEST_ID_REUSED",
            )
        return known[1]

    def keep(self, call: str, request_id: str, content: bytes, operation: Operation) -> None:
        """Remember an operation that has failures left, forget one that has none."""
        if not request_id or not operation.failures:
            self._kept.pop((call, request_id), None)
            return
        self._kept[call, request_id] = (content, operation)
        self._kept.move_to_end((call, request_id))
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
