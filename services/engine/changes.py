"""Wakes whoever watches something.

Invariants: a watcher that remembers the version it has seen misses no change; many changes wake it once.
"""

from __future__ import annotations

import asyncio


class Changes:
    """A version that rises, and those who wait for it to rise."""

    def __init__(self) -> None:
        self.version = 0
        self._risen = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self.version += 1
        risen, self._risen = self._risen, asyncio.Event()
        risen.set()

    async def beyond(self, version: int) -> int:
        """Wait until the version is above `version`; returns it."""
        while self.version <= version:
            await self._risen.wait()
        return self.version
