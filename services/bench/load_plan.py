"""What the load bench offers, in numbers that its processes share.

Invariants: a plan travels to a process as one JSON argument and comes out equal; what is derived is derived here alone,
so that no two processes disagree on it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

from turnout.client import ClientOptions, Security

STEP_S: Final = 4.0
"""Wall seconds between two steps of a trainer. A real step takes minutes and its batch is so much larger; a shorter one
makes more calls for the same groups."""

MINI_BATCHES: Final = 2
GENERATION_S: Final = 6.0
"""Mean wall seconds of a trajectory. Longer ones put more timers into the workers and no more calls on the services but
renewals."""

CLAIM_S: Final = 30.0
"""Lease of a claim: short, so that workers renew most of them."""

SAME_REWARD: Final = 50
"""One of so many groups has equal rewards; it is filtered, and a prompt is asked for in its place."""

FILL: Final = "fill"
"""Tag of the groups that fill the buffer before anything is measured: they take no time to generate."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load."""

    seconds: float = 600.0
    """Wall seconds that are measured, after the buffer was filled."""
    runs: int = 4
    workers: int = 64
    """Over all runs."""
    groups: int = 10_000
    """Resident in the buffer, over all runs."""
    group_size: int = 8
    rate: float = 16.0
    """Groups per second that the trainers consume together; workers produce as many."""
    payload_bytes: int = 4096
    """Of each trajectory: a thousand token ids."""
    queries: float = 20.0
    """Depth queries per second."""

    @property
    def run_ids(self) -> list[str]:
        """The runs."""
        return [f"load-{number}" for number in range(self.runs)]

    @property
    def workers_per_run(self) -> int:
        """Workers of each run."""
        return self.workers // self.runs

    @property
    def groups_per_run(self) -> int:
        """Groups that each run keeps resident."""
        return self.groups // self.runs

    @property
    def mini_batch(self) -> int:
        """Groups that a trainer samples at once."""
        return max(1, round(self.rate * STEP_S / self.runs / MINI_BATCHES))

    @property
    def batch(self) -> int:
        """Groups that a trainer consumes in a step."""
        return MINI_BATCHES * self.mini_batch

    @property
    def least_resident(self) -> int:
        """Groups of all runs that are there at every moment of an even load, negative if they are too few for it.

        Every trainer has taken a batch and not brought the next one's prompts yet; and one is late.
        """
        return self.groups - 2 * self.batch * self.runs

    @property
    def offered(self) -> float:
        """Groups per second that whole batches come to."""
        return self.batch * self.runs / STEP_S


@dataclass(frozen=True, slots=True)
class Access:
    """How a process of the bench reaches the services."""

    buffer: str
    scheduler: str
    bare: str
    engines: dict[str, str]
    """The engine controller of each run."""
    tokens: dict[str, str]
    """Files with tokens: of `reader`, and of `trainer/RUN` and `worker/RUN`; empty: the services ask for none."""
    ca: str | None = None
    """Authority of the services' certificate; None: plain text."""

    def options(self, role: str) -> ClientOptions:
        """What a client of this role passes."""
        return ClientOptions(security=Security(ca=self.ca, token_file=self.tokens.get(role)))


@dataclass(frozen=True, slots=True)
class Errand:
    """All that a process of the bench is told."""

    plan: Plan
    access: Access
    runs: tuple[str, ...]
    """The runs that it works for."""
    ledger: str = ""
    """File for what became of the groups, for trainers."""

    def to_argument(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> Self:
        """Return what `to_argument` told."""
        told = json.loads(text)
        return cls(Plan(**told["plan"]), Access(**told["access"]), tuple(told["runs"]), told["ledger"])
