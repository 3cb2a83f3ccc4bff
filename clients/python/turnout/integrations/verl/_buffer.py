"""verl's custom sampler: its replay buffer as the trainer sees it, over the index.

Invariant: what it answers equals `ReplayBufferAsync` of verl 0.9.1 for the same events, with the exceptions that
docs/verl.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import transfer_queue
from transfer_queue import KVBatchMeta

from turnout.client import BufferClient
from turnout.integrations.verl._index import Index, Rules
from turnout.integrations.verl._setup import VerlSetup


class SampleableUids(Set[str]):
    """The uids that a wait found, read from the buffer when somebody looks: verl's trainer never does."""

    def __init__(self, read: Callable[[], Iterator[str]]) -> None:
        self._read = read

    def __contains__(self, uid: object) -> bool:
        return any(uid == found for found in self._read())

    def __iter__(self) -> Iterator[str]:
        return self._read()

    def __len__(self) -> int:
        return sum(1 for _ in self._read())


class ReplayBuffer:
    """For `trainer.v1.sampler.custom_sampler`; its settings are in `sampler_kwargs`, see VerlSetup."""

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Mapping[str, Any],
        max_off_policy_threshold: Any,
        max_off_policy_strategy: str,
        sampler_kwargs: Mapping[str, Any],
        refill_fn: Callable[[int], Any] | None = None,
    ) -> None:
        """Called by verl's trainer. Raises ValueError naming a setting that is wrong; calls no service yet."""
        if trainer_mode == "sync":
            raise ValueError("a synchronous trainer leaves no idle GPUs to lend: use verl's own replay buffer")
        threshold = max_off_policy_threshold
        if threshold is not None and (not isinstance(threshold, int) or threshold < 1):
            raise ValueError(f"max_off_policy_threshold must be a whole number from 1 on, or null, not {threshold!r}")
        if max_off_policy_strategy not in ("drop", "wait"):
            raise ValueError(f"max_off_policy_strategy must be drop or wait, not {max_off_policy_strategy!r}")
        self.setup = VerlSetup.read(sampler_kwargs)
        self.poll_interval = self.setup.poll_interval
        """Seconds of waiting that verl does not count as idleness."""
        if self.setup.filter_groups_metric is not None and refill_fn is None:
            raise ValueError("filter_groups_metric needs a refill_fn, which replaces the groups that are filtered out")
        rules = Rules(
            threshold,
            max_off_policy_strategy == "wait",
            self.setup.filter_groups_metric,
            refill=refill_fn is not None,
        )
        self.index = Index(
            self.setup.run_id,
            rules,
            transfer_queue,
            BufferClient(self.setup.buffer),
            refill_fn=refill_fn,
            look_interval=self.setup.look_interval,
        )

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """How many groups could be sampled at this step."""
        self.index.start()
        return self.index.depth(global_steps, partition_id)

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[SampleableUids, dict[str, float]]:
        """Wait until `target_count` groups are sampleable, evicting and refilling meanwhile.

        Returns their uids, and what was evicted under verl's metric names.
        """
        self.index.start()
        metrics = self.index.wait(global_steps, partition_id, target_count)
        return SampleableUids(lambda: self.index.sampleable(partition_id)), metrics

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for the `batch_size` oldest groups and take them out: keys and tags of all their outputs."""
        self.index.start()
        uids, metrics = self.index.sample(global_steps, partition_id, batch_size)
        keys, tags = self.index.materialize(partition_id, uids)
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), metrics
