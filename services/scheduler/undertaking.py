"""A trainer's call that is being worked on, with how far it came.

Invariants: what is noted here was done and is not done again when the call goes on, in this process or in the next;
a call that failed is forgotten, so its repeat begins anew, unless a wait stands behind it, whose end is not waited for
twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from services.scheduler.domain.calls import CallKey
from services.scheduler.policies.types import Decision
from turnout.buffer.v1 import buffer_pb2

Outcome: TypeAlias = "buffer_pb2.WaitOutcome.ValueType"


@dataclass(frozen=True, slots=True)
class WaitEnd:
    """How a wait ended: the buffer's last word, the policy's last decision, and the seconds it took."""

    outcome: Outcome
    done: buffer_pb2.WaitDone
    decision: Decision | None
    reason: str
    waited_s: float


@dataclass(slots=True)
class Undertaking:
    """How far the call `key` came. `content` stands for all that it said, `request` is all of it.

    decided: what the call makes happen was recorded, and the policy asked. decision: what it answered. sampleable: the
    depth it saw. lend_id: the lend that was decided on, empty if none. lend_failure: why that came to nothing.
    checkpoint_id: the checkpoint that the buffer was asked for.
    """

    key: CallKey
    content: bytes
    request: bytes
    decided: bool = False
    decision: Decision | None = None
    sampleable: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    wait_end: WaitEnd | None = None
    lend_id: str = ""
    lend_failure: str = ""
    checkpoint_id: str = ""

    @property
    def began(self) -> bool:
        """Whether something was set in motion, or will be, whether or not the trainer asks again."""
        return self.decided or self.wait_end is not None

    def is_of(self, key: CallKey, content: bytes) -> bool:
        """Whether it is that of this very call."""
        return (self.key, self.content) == (key, content)
