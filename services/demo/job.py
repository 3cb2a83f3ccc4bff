"""What the demo's training job is: its size, its speeds and its costs.

Invariants: every duration is in domain seconds; a job is fully described by its JSON, which every process of it gets;
two jobs that differ in `switching` and `policy` alone deliver the same trajectories.

The constants were fitted to a published run (3 nodes of 8 H100, two of them hybrid, tensor parallelism 4; 18.80 h
without and 16.43 h with switching, verl pull request 7373).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

GPUS_PER_REPLICA: Final = 4
"""Tensor parallelism of the published run."""

REPLICAS_PER_NODE: Final = 2
"""Eight GPUs per node."""

WEIGHT_BYTES: Final = 1 << 20
"""Of each replica: enough to be moved in earnest, little enough not to be what the demo measures."""

SMALLEST_TIME_SCALE: Final = 0.001
"""Below a millisecond per second a job measures the machine's scheduler instead of ours."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the demo."""

    seed: int = 0
    """Decides, with the prompt, every length; and the order of the prompts."""

    switching: bool = False
    policy: str = "jit"
    """Policy of the run; with switching off every policy acts as `off`."""

    time_scale: float = 0.065
    """Wall seconds per domain second."""

    steps: int = 3
    group_size: int = 8
    """Trajectories per prompt."""

    mini_batch_size: int = 16
    """Groups per mini-batch."""

    mini_batches: int = 4
    """Mini-batches per step (verl's parameter_sync_step)."""

    warmup_batches: float = 1.0
    """Batches in flight before the first step, as by verl's default (num_warmup_batches)."""

    training_s: float = 255.0
    """Training per step, all mini-batches together. Fitted."""

    lend_s: float = 15.0
    """From the decision until hybrid replicas serve. Assumed."""

    reclaim_s: float = 5.0
    """Until the trainer has its GPUs. Assumed."""

    sync_s: float = 18.0
    """Weight update of standalone replicas. Assumed."""

    decode_base_s: float = 0.00975
    """Seconds per decode iteration, before the part that grows with the running requests. Fitted."""

    decode_slope_s: float = 0.000078
    """Seconds that each running request adds to an iteration. Fitted."""

    prefill_tokens_per_s: float = 60_000.0
    """Of each replica. Assumed."""

    mean_tokens: float = 14_000.0
    """Mean response before the cap, which brings it to the published 13 000 or so."""

    log_std: float = 0.75
    """Of the response length. Fitted."""

    between_prompts: float = 0.85
    """Share of the log-variance that lies between prompts. Fitted."""

    max_tokens: int = 32_768
    """Longest response. As published."""

    standalone_nodes: int = 1
    hybrid_nodes: int = 2

    @property
    def batch_size(self) -> int:
        """Groups per step."""
        return self.mini_batch_size * self.mini_batches

    @property
    def total_groups(self) -> int:
        """Prompts of the whole job. Warm-up takes the first of them, so that every prompt is trained on, once."""
        return self.steps * self.batch_size

    @property
    def warmup_groups(self) -> int:
        """Prompts added before the first step."""
        return min(int(self.warmup_batches * self.batch_size), self.total_groups)

    @property
    def standalone_gpus(self) -> int:
        """GPUs that only generate."""
        return self.standalone_nodes * REPLICAS_PER_NODE * GPUS_PER_REPLICA

    @property
    def hybrid_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.hybrid_nodes * REPLICAS_PER_NODE * GPUS_PER_REPLICA

    @property
    def mode(self) -> str:
        """`on` or `off`."""
        return "on" if self.switching else "off"

    @property
    def run_id(self) -> str:
        """The run in the three services."""
        return f"demo-{self.seed}-{self.mode}"

    def to_json(self) -> str:
        """Return the job for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that another process wrote."""
        return cls(**json.loads(text))
