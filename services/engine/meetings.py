"""Where trainer ranks and engine ranks wait for each other's bytes.

Invariant: whoever waits is told when the meeting is full, or when its transaction is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from services.engine.changes import Changes
from services.engine.domain.rendezvous import Rendezvous
from services.engine.domain.weights import Updates
from services.runtime.errors import deadline_exceeded


class Meetings:
    """The meetings of the open transactions."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._rendezvous = Rendezvous()
        self._changes = Changes()

    async def exchange(
        self, update_id: str, name: str, participant: str, participants: list[str], blob: bytes, max_wait: float
    ) -> Mapping[str, bytes]:
        """Bring bytes to a meeting and wait at most `max_wait` wall seconds for those of the others."""
        update = self._updates.require_open(update_id)
        meeting = self._rendezvous.join(update_id, name, participant, participants, blob)
        self._changes.notify()
        try:
            async with asyncio.timeout(max_wait):
                while not meeting.full:
                    self._updates.require_open(update.update_id)
                    await self._changes.beyond(self._changes.version)
        except TimeoutError:
            raise deadline_exceeded(
                "RENDEZVOUS_INCOMPLETE",
                f"meeting {name!r} waits for {', '.join(meeting.missing)[:200]}",
                name=name,
                missing=meeting.missing[0],
            ) from None
        return dict(meeting.blobs)

    def forget(self, update_id: str) -> None:
        """A transaction is over."""
        self._rendezvous.forget(update_id)
        self._changes.notify()
