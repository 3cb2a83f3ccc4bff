"""The same hooks for a trainer that has one thread and no event loop.

Invariant: nothing is decided here; each hook runs the coroutine of AsyncTrainerHooks to its end on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, EngineClient, SchedulerClient
from turnout.client._link import run_blocking
from turnout.client._payloads import Bytes
from turnout.scheduler.v1 import events_pb2
from turnout.trainer._batch import Batch
from turnout.trainer._hooks import AsyncTrainerHooks
from turnout.trainer._setup import TrainerSetup
from turnout.trainer._weights import UpdateWeights, WeightTarget


class TrainerHooks:
    """The hooks of AsyncTrainerHooks, blocking. All callbacks run on the calling thread."""

    def __init__(
        self, core: AsyncTrainerHooks, buffer: BufferClient, engine: EngineClient, scheduler: SchedulerClient
    ) -> None:
        self._core = core
        self.buffer = buffer
        self.engine = engine
        self.scheduler = scheduler
        self.epoch = core.epoch
        """Fencing token of this trainer."""
        self.next_step = core.next_step
        """Step that comes first."""
        self.warmup_groups = core.warmup_groups
        """Prompts to add before it."""
        self.time_scale = core.time_scale
        """Wall seconds per domain second: 1 except in demos and tests."""

    @classmethod
    def open(cls, setup: TrainerSetup) -> Self:
        """See AsyncTrainerHooks."""
        buffer = BufferClient(setup.buffer, setup.options)
        engine = EngineClient(setup.engine, setup.options)
        scheduler = SchedulerClient(setup.scheduler, setup.options)
        core = run_blocking(AsyncTrainerHooks.open_with(setup, buffer.core, engine.core, scheduler.core))
        return cls(core, buffer, engine, scheduler)

    @property
    def mode(self) -> events_pb2.Mode.ValueType:
        """Who has the hybrid GPUs, as the scheduler said last."""
        return self._core.mode

    @property
    def cursor(self) -> int:
        """See AsyncTrainerHooks."""
        return self._core.cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._core.cursor = value

    def close(self, *, reason: str | None = None) -> None:
        """See AsyncTrainerHooks."""
        run_blocking(self._core.close(reason=reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._core.__aexit__(kind, error, trace))

    def on_init_end(self, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_init_end(update_weights))

    def on_train_begin(self, groups: Sequence[buffer_pb2.GroupSpec] = ()) -> int:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_train_begin(groups))

    def add_groups(self, step: int, groups: Sequence[buffer_pb2.GroupSpec], *, end_of_prompts: bool = False) -> int:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.add_groups(step, groups, end_of_prompts=end_of_prompts))

    def on_step_begin(self, step: int) -> events_pb2.Mode.ValueType:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_step_begin(step))

    def prepare_step(self, step: int) -> dict[str, float]:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.prepare_step(step))

    def on_sample_begin(
        self, step: int, mini_batch: int, update_weights: UpdateWeights | None = None
    ) -> dict[str, float]:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_sample_begin(step, mini_batch, update_weights))

    def sample(self, step: int, mini_batch: int, batch: int, *, max_wait: float | None = None) -> Batch:
        """See AsyncTrainerHooks."""
        return Batch(run_blocking(self._core.sample(step, mini_batch, batch, max_wait=max_wait)))

    def on_sample_end(
        self, step: int, mini_batch: int, *, tokens: int | None = None, wait_seconds: float | None = None
    ) -> float:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_sample_end(step, mini_batch, tokens=tokens, wait_seconds=wait_seconds))

    def on_step_end(self, step: int, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_step_end(step, update_weights))

    def on_validate_begin(self, step: int, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.on_validate_begin(step, update_weights))

    def on_validate_end(self, step: int) -> None:
        """See AsyncTrainerHooks."""
        run_blocking(self._core.on_validate_end(step))

    def save(self, step: int) -> str:
        """See AsyncTrainerHooks."""
        return run_blocking(self._core.save(step))

    def move_bytes(self, target: WeightTarget, data: Bytes | Sequence[Bytes], *, info_json: str = "") -> None:
        """See AsyncTrainerHooks."""
        run_blocking(self._core.move_bytes(target, data, info_json=info_json))
