"""Meetings at which trainer ranks and engine ranks exchange bytes.

Invariants: a meeting has one list of participants; whoever comes twice brings the same bytes; a full meeting is
remembered until its transaction closes, so that a repeated call gets the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.runtime.errors import invalid_argument, require_id

MAX_BLOB_BYTES: Final = 1 << 20
"""A communicator id or a table of handles is some kilobytes; more is meant for UpdateWeights."""

MAX_MEETING_BYTES: Final = 3 << 20
"""The answer, which has the bytes of all, must fit into the 4 MiB that gRPC clients take by default."""


@dataclass(slots=True)
class Meeting:
    """Who must come, and what was brought."""

    participants: frozenset[str]
    blobs: dict[str, bytes] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return self.blobs.keys() == self.participants

    @property
    def missing(self) -> list[str]:
        """Those who have not come, by name."""
        return sorted(self.participants - self.blobs.keys())


class Rendezvous:
    """All meetings, by transaction and name."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, str], Meeting] = {}

    def join(self, update_id: str, name: str, participant: str, participants: list[str], blob: bytes) -> Meeting:
        """Bring bytes to a meeting; INVALID_ARGUMENT names what does not fit."""
        require_id("name", name)
        require_id("participant", participant)
        for other in participants:
            require_id("participants", other)
        if len(blob) > MAX_BLOB_BYTES:
            raise invalid_argument("blob", f"a blob holds at most {MAX_BLOB_BYTES} bytes", value=len(blob))
        wanted = frozenset(participants)
        if participant not in wanted:
            raise invalid_argument("participant", "it is not among the participants", value=participant)
        known = self._meetings.get((update_id, name))
        meeting = known or Meeting(wanted)
        if meeting.participants != wanted:
            raise invalid_argument(
                "participants",
                f"meeting {name!r} was opened with other participants",
                reason="PARTICIPANTS_DIFFER",
            )
        if meeting.blobs.get(participant, blob) != blob:
            raise invalid_argument(
                "blob", f"{participant!r} brought other bytes before", value=participant, reason="BLOB_CHANGED"
            )
        others = sum(len(brought) for who, brought in meeting.blobs.items() if who != participant)
        if others + len(blob) > MAX_MEETING_BYTES:
            raise invalid_argument(
                "blob", f"the blobs of a meeting hold at most {MAX_MEETING_BYTES} bytes", value=others + len(blob)
            )
        meeting.blobs[participant] = blob
        self._meetings[update_id, name] = meeting
        return meeting

    def forget(self, update_id: str) -> None:
        """A transaction is over."""
        for key in [key for key in self._meetings if key[0] == update_id]:
            del self._meetings[key]
