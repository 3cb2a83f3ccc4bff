"""The `file` weight-transfer engine: weights that a trainer on the same machine wrote as safetensors.

Invariants: one file is one chunk of an update, and several make a whole one; a file whose CRC32C is not the one that
was named is refused before a byte of it reaches the model. It stands in for the nccl and ipc engines where there is no
GPU, and for them it is loaded in checkpoint format, as theirs is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google_crc32c
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND: Final = "file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on: every update names its file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One safetensors file; `crc32c` is that of its bytes as 8 hexadecimal digits, empty to trust it."""

    path: str
    crc32c: str = ""


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Reads files into the model of one worker."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Have the layers take checkpoint weights again."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Bring the layers into the form in which they compute."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load one file. The base class would synchronise an accelerator that is not there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load one file; ValueError if it is not the one that was named."""
        data = Path(update_info.path).read_bytes()
        crc32c = f"{google_crc32c.value(data):08x}"
        if update_info.crc32c and update_info.crc32c != crc32c:
            raise ValueError(f"{update_info.path} has CRC32C {crc32c}, not {update_info.crc32c}")
        self.model.load_weights(load(data).items())

    def shutdown(self) -> None:
        """Nothing to release."""


def register() -> None:
    """Make the engine known to vLLM in this process; once is enough."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
