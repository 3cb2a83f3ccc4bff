"""Trajectory: one session of a group.

Invariants: it settles once; `attempt` rises with every re-issue, which makes the tokens of earlier attempts stale;
`failures` counts only the attempts that were used up.
"""

from dataclasses import dataclass
from enum import Enum

from services.buffer.domain.outputs import Outputs

# Kept of an error text: enough for the last line of a traceback, small enough to be listed.
MAX_ERROR_BYTES = 1024


class TrajectoryState(Enum):
    """Where a trajectory stands; the numbers are those of the wire."""

    PENDING = 1
    RUNNING = 2
    FINISHED = 3
    FAILED = 4


@dataclass(slots=True, eq=False)
class Trajectory:
    """One session; `claim_id` names the last claim and stays when that ends, so it tells whether there ever was one."""

    state: TrajectoryState = TrajectoryState.PENDING
    attempt: int = 1
    failures: int = 0
    claim_id: str = ""
    outputs: Outputs | None = None
    partial: Outputs | None = None
    done: int | None = None
    error: str = ""

    @property
    def fresh(self) -> bool:
        """Whether nothing has happened to it yet."""
        return self.state is TrajectoryState.PENDING and self.attempt == 1 and not self.claim_id and not self.error

    @property
    def plain(self) -> bool:
        """Whether it finished at its first attempt."""
        return self.state is TrajectoryState.FINISHED and self.attempt == 1 and not self.failures and not self.error


def cut_error(text: str) -> str:
    """The first kilobyte of an error text, cut on a character boundary."""
    if len(text) * 4 <= MAX_ERROR_BYTES:
        return text
    return text.encode("utf-8")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")
