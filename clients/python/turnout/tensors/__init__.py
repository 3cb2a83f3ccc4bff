"""Tensors as payloads: `pack` and `unpack`, in the safetensors format, without a copy too many.

    payload = await worker.payload(pack({"tokens": tokens, "logprobs": logprobs}), SAFETENSORS)
    for data in batch.payloads():
        tensors = unpack(data)

Needs numpy (`pip install 'turnout[tensors]'`); torch tensors where torch is installed.
"""

from turnout.tensors._header import BadTensors
from turnout.tensors._pack import SAFETENSORS, pack, unpack

__all__ = ["SAFETENSORS", "BadTensors", "pack", "unpack"]
