"""Tensors and dicts of tensors as safetensors payloads and back.

Invariants: packing copies no tensor that is dense, little-endian and in main memory; unpacking copies none that is
aligned; reading runs no code that came with the bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Final, Literal

from turnout.client._payloads import Bytes, join
from turnout.tensors._frameworks import decode_numpy, decode_torch, encode
from turnout.tensors._header import SIZES, read_header, write_header
from turnout.tensors._tree import flatten, unflatten

SAFETENSORS: Final = "application/x-safetensors"
"""Content type of what `pack` makes."""


def pack(tree: Any) -> list[Bytes]:
    """Return a tensor, or a dict of them, nested as it likes, as the parts of one payload.

    The parts are the header and views of the tensors themselves, for `put`, `put_payload` and `RolloutWorker.payload`:
    write to no tensor before they are sent. Takes numpy arrays and torch tensors of any device; those that are not
    contiguous, big-endian or not in main memory are copied. Raises TypeError for other objects and for dtypes that
    safetensors does not have, ValueError for dicts nested more than 64 deep.
    """
    flat, metadata = flatten(tree)
    encoded = [(name, *encode(name, tensor)) for name, tensor in flat.items()]
    # The widest first, so that each is aligned to its own width.
    encoded.sort(key=lambda one: -SIZES[one[1]])
    header = write_header([(name, dtype, shape) for name, dtype, shape, _ in encoded], metadata)
    return [header, *(data for *_, data in encoded if len(data))]


def unpack(data: Bytes | Sequence[Bytes], framework: Literal["numpy", "torch"] | None = None) -> Any:
    """Return what was packed: views of `data`, which they keep alive, as arrays or tensors of `framework`.

    `framework`: torch where it is installed, unless given. Views of bytes or of a store's shared memory must not be
    written: numpy refuses that, torch cannot; `tensor.clone()` is one's own. Reads any safetensors file; names that
    others wrote are not parted into dicts. Raises BadTensors, a ValueError, for anything else, however it was made.
    """
    view = memoryview(data if isinstance(data, bytes | bytearray | memoryview) else join(data)).cast("B")
    entries, metadata = read_header(view)
    if framework is None:
        framework = "torch" if importlib.util.find_spec("torch") is not None else "numpy"
    decode = decode_torch if framework == "torch" else decode_numpy
    return unflatten({entry.name: decode(view, entry) for entry in entries}, metadata)
