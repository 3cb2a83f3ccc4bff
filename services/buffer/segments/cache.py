"""ReadCache: payloads read or written lately, in bounded memory.

Invariants: what is cached together with its overhead never passes the limit; the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_ENTRY_BYTES: Final = 200
"""What an entry takes beside its data: the entry, the bytes object and its id."""


class ReadCache:
    """Bytes by payload id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self.size = 0

    def get(self, payload_id: str) -> bytes | None:
        """The bytes of a payload, if they are here."""
        data = self._data.get(payload_id)
        if data is not None:
            self._data.move_to_end(payload_id)
        return data

    def add(self, payload_id: str, data: bytes) -> None:
        """Take in a payload, unless it alone passes the limit."""
        self.discard(payload_id)
        if len(data) + _ENTRY_BYTES > self._limit:
            return
        self._data[payload_id] = data
        self.size += len(data) + _ENTRY_BYTES
        while self.size > self._limit:
            _, gone = self._data.popitem(last=False)
            self.size -= len(gone) + _ENTRY_BYTES

    def discard(self, payload_id: str) -> None:
        """Let go of a payload."""
        data = self._data.pop(payload_id, None)
        if data is not None:
            self.size -= len(data) + _ENTRY_BYTES
