"""The memory of the reference engine: real bytes, which a sleep gives back and a wake fills again.

Invariants: a tag that is asleep has no buffer; KV comes back empty; weights come back as they were from level 1 and as
noise from level 2.
"""

from __future__ import annotations

from typing import Final

import google_crc32c

from services.engine.domain.spec import KV_CACHE, WEIGHTS

NOISE: Final = b"\xa5"
"""What fresh weight memory holds: something else than zeros, so that a forgotten load shows in the checksum."""


class Memory:
    """The buffers of one shard. `loaded` is how many weight bytes mean something."""

    def __init__(self, weights_bytes: int, kv_bytes: int) -> None:
        self._sizes = {WEIGHTS: weights_bytes, KV_CACHE: kv_bytes}
        self._buffers: dict[str, bytearray] = {WEIGHTS: bytearray(NOISE * weights_bytes), KV_CACHE: bytearray(kv_bytes)}
        self._offloaded: bytes | None = None
        self.loaded = weights_bytes

    @property
    def tags(self) -> frozenset[str]:
        return frozenset(self._sizes)

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(self._buffers)

    @property
    def size(self) -> int:
        """Bytes held on the device."""
        return sum(len(buffer) for buffer in self._buffers.values())

    def behind(self, tag: str) -> int:
        """Bytes held for one tag."""
        return len(self._buffers.get(tag, b""))

    def sleep(self, level: int) -> None:
        """Give everything back; level 1 keeps a copy of the weights on the host, if it does not have one."""
        weights = self._buffers.get(WEIGHTS)
        if weights is not None:
            self._offloaded = bytes(weights) if level == 1 else None
        self._buffers.clear()

    def release(self, tag: str) -> None:
        """Give one tag back, with its content."""
        self._buffers.pop(tag, None)

    def wake(self, tags: frozenset[str]) -> None:
        """Fill these tags again; those that are resident are left alone."""
        for tag in tags - self.resident:
            if tag == WEIGHTS:
                content = self._offloaded or NOISE * self._sizes[tag]
                self._offloaded = None
                self._buffers[tag] = bytearray(content)
            else:
                self._buffers[tag] = bytearray(self._sizes[tag])

    def write(self, offset: int, chunk: bytes) -> None:
        """Put weights at an offset."""
        self._buffers[WEIGHTS][offset : offset + len(chunk)] = chunk

    def checksum(self) -> str:
        """CRC32C of the loaded weights, 8 hexadecimal digits."""
        return f"{google_crc32c.value(bytes(self._buffers[WEIGHTS][: self.loaded])):08x}"
