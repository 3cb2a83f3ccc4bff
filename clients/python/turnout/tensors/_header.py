"""The header of safetensors: pure, and distrustful.

Format: 8 bytes with the length of the header, little-endian; the header, a JSON object of names to {dtype, shape,
data_offsets}, padded with spaces; the tensors, row-major and little-endian, one behind the other without holes
(https://huggingface.co/docs/safetensors/index#format, whose reference implementation the tests compare with).

Invariants: whatever the bytes are, reading ends with an error or with tensors that lie within them, cover them, and
have the sizes that their shapes say; a name comes once; nothing is allocated by what a header claims.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SIZES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element."""

MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""Some hundred thousand tensors. The format allows 100 MB, which Python would need a gigabyte to read."""

MAX_DIMENSIONS: Final = 64
"""As numpy has it."""

ALIGNMENT: Final = 64
"""Where the tensors begin, from the beginning of the bytes: a cache line."""


class BadTensors(ValueError):
    """Bytes that are not safetensors, or not ones that can be trusted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor is. Offsets count from the beginning of all bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_header(entries: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors, given (name, dtype, shape) in the order in which they follow."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in entries:
        end = at + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {len(entries)} tensors has {len(text)} bytes, above {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def read_header(data: memoryview) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors in the order of their bytes, and the metadata. Raises BadTensors."""
    if len(data) < 8:
        raise BadTensors(f"{len(data)} bytes are no safetensors")
    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise BadTensors(f"the header claims {size} bytes, of {len(data)} in all and {MAX_HEADER_BYTES} allowed")
    header = _parse(bytes(data[8 : 8 + size]))
    metadata = _metadata(header.pop("__metadata__", {}))
    start = 8 + size
    entries = [_entry(name, said, start, len(data)) for name, said in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = start
    for entry in entries:
        if entry.begin != at:
            raise BadTensors(f"tensor {entry.name!r} begins at byte {entry.begin}, the bytes before end at {at}")
        at = entry.end
    if at != len(data):
        raise BadTensors(f"{len(data) - at} bytes belong to no tensor")
    return entries, metadata


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except BadTensors:
        raise
    except (ValueError, RecursionError) as error:
        raise BadTensors(f"the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadTensors("the header is no JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise BadTensors("a name comes twice in the header")
    return made


def _metadata(said: Any) -> dict[str, str]:
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise BadTensors("the metadata is no object of texts")
    return said


def _entry(name: str, said: Any, start: int, limit: int) -> Entry:
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadTensors(f"tensor {name!r} does not have dtype, shape and data_offsets")
    dtype = said["dtype"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise BadTensors(f"tensor {name!r} has the unknown dtype {dtype!r}")
    shape = _numbers(name, said["shape"], "shape")
    offsets = _numbers(name, said["data_offsets"], "data_offsets")
    if len(shape) > MAX_DIMENSIONS:
        raise BadTensors(f"tensor {name!r} has {len(shape)} dimensions")
    if math.prod(max(length, 1) for length in shape) * SIZES[dtype] >= 2**63:
        raise BadTensors(f"tensor {name!r} has a shape above 2**63 bytes")
    if len(offsets) != 2:
        raise BadTensors(f"tensor {name!r} has {len(offsets)} data_offsets")
    begin, end = start + offsets[0], start + offsets[1]
    if not begin <= end <= limit:
        raise BadTensors(f"tensor {name!r} lies outside of the bytes")
    if end - begin != SIZES[dtype] * math.prod(shape):
        raise BadTensors(f"tensor {name!r} has {end - begin} bytes, which is not what its shape says")
    return Entry(name, dtype, shape, begin, end)


def _numbers(name: str, said: Any, what: str) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(number) is int and 0 <= number < 2**63 for number in said):
        raise BadTensors(f"tensor {name!r} has a {what} that is no list of numbers")
    return tuple(said)
