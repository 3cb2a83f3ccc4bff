"""What we add to a vLLM worker, as its `worker_extension_cls`; it works with any worker.

Invariant: methods have names that no worker has, and answer with JSON values, since they are also called over HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from services.engine.domain.spec import KV_CACHE, WEIGHTS
from services.engine.vllm.storages import resident_bytes, size_of


class WorkerExtension:
    """Mixed into the worker class; `collective_rpc("turnout_memory")` reaches it."""

    model_runner: Any
    vllm_config: Any

    def turnout_facts(self) -> dict[str, int]:
        """What a server does not tell of its model."""
        return {"vocabulary": int(self.vllm_config.model_config.get_vocab_size())}

    def turnout_memory(self) -> dict[str, Any]:
        """Memory of this worker, in bytes, as it is measured now.

        `used` is what the device counts as taken, or the resident set of the process where the device is the CPU.
        `tags` is what is behind each tag, None where that cannot be seen.
        """
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return {"pid": os.getpid(), "used": total - free, "tags": mapped_bytes(_allocations())}
        model = self.model_runner.get_model()
        tags = {
            WEIGHTS: size_of([*model.parameters(), *model.buffers()]),
            KV_CACHE: size_of(self.model_runner.kv_caches),
        }
        return {"pid": os.getpid(), "used": resident_bytes(), "tags": tags}


def mapped_bytes(allocations: Iterable[Any]) -> dict[str, int] | None:
    """Bytes of vLLM's sleep allocator that have memory behind them, by tag.

    A freed tensor keeps its size on a GPU, so its own allocator is asked. None without allocations, which is an engine
    without sleep mode, or if they do not tell whether they are asleep.
    """
    sizes = {WEIGHTS: 0, KV_CACHE: 0}
    known = list(allocations)
    if not known or not all(hasattr(each, "is_asleep") for each in known):
        return None
    for each in known:
        if each.tag in sizes and not each.is_asleep:
            # Device, size, address and handle.
            sizes[each.tag] += each.handle[1]
    return sizes


def _allocations() -> Iterable[Any]:
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return () if allocator is None else allocator.pointer_to_data.values()
