"""What the learning job is: its size, its model's engines, its learning rate.

Invariants: a job is fully described by its JSON, which every process of it gets; times are wall seconds.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

PARTITION: Final = "train"
HYBRID: Final = "hybrid-0"
STANDALONE: Final = "standalone-0"
REPLICAS: Final = [
    {"replica_id": STANDALONE, "role": "standalone"},
    {"replica_id": HYBRID, "role": "hybrid"},
]
"""As the event file names them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    seed: int = 0
    """Decides the model's first weights, the order of the prompts and what is sampled."""

    steps: int = 32
    batch_size: int = 16
    """Groups per step."""

    mini_batches: int = 2
    """Changes of the policy per step."""

    group_size: int = 16
    """Answers per prompt."""

    answer_tokens: int = 4
    """Length of every answer."""

    learning_rate: float = 5e-3
    hybrid_kv_bytes: int = 512 << 20
    """KV memory of the hybrid replica: enough to see it come and go."""

    standalone_kv_bytes: int = 64 << 20

    @property
    def mini_batch_size(self) -> int:
        """Groups per change of the policy."""
        return self.batch_size // self.mini_batches

    @property
    def total_groups(self) -> int:
        """Groups of the whole job. No step is ahead of another, so that every answer is by the newest weights."""
        return self.steps * self.batch_size

    @property
    def run_id(self) -> str:
        """The run in the three services."""
        return f"learner-{self.seed}"

    def to_json(self) -> str:
        """Return the job for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that another process wrote."""
        return cls(**json.loads(text))
