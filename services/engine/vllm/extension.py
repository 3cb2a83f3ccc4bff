"""What we add to a vLLM worker, as its `worker_extension_cls`; it works with any worker.

Invariant: methods have names that no worker has, and answer with JSON values, since they are also called over HTTP.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from services.engine.vllm.storages import resident_bytes, size_of


class WorkerExtension:
    """Mixed into the worker class; `collective_rpc("turnout_memory")` reaches it."""

    model_runner: Any
    vllm_config: Any

    def turnout_facts(self) -> dict[str, int]:
        """What a server does not tell of its model."""
        return {"vocabulary": int(self.vllm_config.model_config.get_vocab_size())}

    def turnout_memory(self) -> dict[str, int]:
        """Memory of this worker, in bytes.

        `used` is what the device counts as taken, or the resident set of the process where the device is the CPU.
        `weights` and `kv_cache` are the storages behind the tensors, 0 while a CPU worker has them freed; on a GPU
        they keep their nominal size.
        """
        runner = self.model_runner
        model = runner.get_model()
        weights = [*model.parameters(), *model.buffers()]
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            used = total - free
        else:
            used = resident_bytes()
        return {
            "pid": os.getpid(),
            "used": used,
            "weights": size_of(weights),
            "kv_cache": size_of(runner.kv_caches),
        }
