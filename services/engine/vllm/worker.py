"""A vLLM worker on the CPU whose sleep really frees memory: `worker_cls` of an engine without a GPU.

Invariants: the contract is that of vLLM's GPU worker: level 1 keeps a copy of the weights elsewhere (here a file),
level 2 keeps the buffers alone, KV memory is always dropped; the tags `weights` and `kv_cache` select what a wake
refills. A tag that is as asked is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from services.engine.vllm.extension import WorkerExtension
from services.engine.vllm.storages import Storages
from services.engine.vllm.transfer import register

register()


class SleepingCpuWorker(CPUWorker, WorkerExtension):
    """The CPU worker, with memory that comes and goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storages = {"weights": Storages(), "kv_cache": Storages()}
        self._buffers: dict[str, torch.Tensor] = {}

    def sleep(self, level: int = 1) -> None:
        """Free both tags."""
        if level == 2 and self._storages["weights"].resident:
            self._buffers = {name: buffer.clone() for name, buffer in self.model_runner.model.named_buffers()}
        self._storages["weights"].free(self.tagged("weights"), keep_copy=level == 1)
        self._storages["kv_cache"].free(self.tagged("kv_cache"), keep_copy=False)

    def discard(self, tags: Sequence[str]) -> None:
        """Free tags without a copy."""
        for tag in tags:
            self._storages[tag].free(self.tagged(tag), keep_copy=False)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Refill tags; None is both."""
        for tag in self._storages if tags is None else tags:
            self._storages[tag].refill()
            if tag == "weights":
                self._restore_buffers()

    def _restore_buffers(self) -> None:
        for name, buffer in self.model_runner.model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        self._buffers = {}

    def tagged(self, tag: str) -> Iterable[torch.Tensor]:
        """The tensors of a tag."""
        runner = self.model_runner
        if tag == "kv_cache":
            return list(runner.kv_caches)
        return [*runner.model.parameters(), *runner.model.buffers()]
