"""What can go wrong with payload bytes, as the errors of Turnout.

Invariants: a full disk refuses and keeps nothing; damage is DATA_LOSS of the payload that it hit, which is named; after
a failed fsync the process must exit, for the reason that the journal gives.
"""

from __future__ import annotations

import errno
from typing import Final

from services.runtime.errors import TurnoutError, data_loss, describe, resource_exhausted, unavailable

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def write_failed(error: OSError) -> TurnoutError:
    """Bytes could not be written; none of them are kept."""
    if error.errno in FULL:
        return resource_exhausted("DISK_FULL", "the disk of the payloads is full", detail=describe(error))
    return unavailable("PAYLOAD_IO", "payload bytes could not be written", detail=describe(error))


def sync_failed(error: OSError) -> TurnoutError:
    """The disk did not confirm bytes."""
    message = "the disk did not confirm payload bytes; this process ends"
    return unavailable("PAYLOAD_FSYNC_FAILED", message, detail=describe(error))


def damaged(payload_id: str, detail: str) -> TurnoutError:
    """The bytes of a payload are not what was written."""
    return data_loss(
        "PAYLOAD_DAMAGED", f"the payload is damaged: {detail}", field="id", value=payload_id, detail=detail
    )


def closed() -> TurnoutError:
    """The store was closed."""
    return unavailable("PAYLOADS_CLOSED", "the payload store is closed")
