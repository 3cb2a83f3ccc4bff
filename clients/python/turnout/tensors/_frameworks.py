"""Tensors of numpy and torch as bytes and back.

Invariants: bytes are little-endian and row-major; a tensor that is so already is not copied, neither way; what comes
back has the dtype and shape that went in.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import numpy as np

from turnout.client._payloads import Bytes
from turnout.tensors._header import SIZES, BadTensors, Entry

# By numpy's names; those of ml_dtypes, where it is installed, are the last.
_NUMPY: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_NAMES: Final = {dtype: name for name, dtype in _NUMPY.items()}


def encode(name: str, tensor: Any) -> tuple[str, tuple[int, ...], Bytes]:
    """Return dtype, shape and bytes of a tensor. Raises TypeError for what has none."""
    if isinstance(tensor, np.ndarray | np.generic):
        return _encode_numpy(name, np.asarray(tensor))
    # Not imported for those who do not use it: whoever has a tensor of it has imported it.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _encode_torch(name, tensor, torch)
    raise TypeError(f"{name!r} is {type(tensor).__name__}, neither a numpy array nor a torch tensor")


def _encode_numpy(name: str, array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], Bytes]:
    dtype = _NUMPY.get(array.dtype.name)
    if dtype is None:
        raise TypeError(f"{name!r} has the dtype {array.dtype}, which safetensors does not have")
    shape = array.shape
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1)
    return dtype, shape, flat.view(np.uint8).data if flat.size else b""


def _encode_torch(name: str, tensor: Any, torch: Any) -> tuple[str, tuple[int, ...], Bytes]:
    dtype = _NUMPY.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise TypeError(f"{name!r} has the dtype {tensor.dtype}, which safetensors does not have")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"{name!r} is no dense tensor with data")
    # Each of these is free for an ordinary tensor in memory.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return dtype, tuple(tensor.shape), b""
    return dtype, tuple(tensor.shape), memoryview(plain.reshape(-1).view(torch.uint8).numpy())


def decode_numpy(data: memoryview, entry: Entry) -> np.ndarray[Any, Any]:
    """Return the array of an entry: a view of `data`, or a copy if it does not lie where numpy can read fast."""
    dtype = _numpy_dtype(entry)
    if entry.begin == entry.end:
        return np.empty(entry.shape, dtype)
    raw = np.frombuffer(data[entry.begin : entry.end], np.uint8)
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return raw.view(dtype).reshape(entry.shape)


def _numpy_dtype(entry: Entry) -> np.dtype[Any]:
    name = _NAMES[entry.dtype]
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError:
        pass
    try:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except ImportError as error:
        message = f"{entry.name!r} is {name}, which numpy does not have: pip install ml_dtypes, or unpack for torch"
        raise BadTensors(message) from error
    return dtype


def decode_torch(data: memoryview, entry: Entry) -> Any:
    """Return the torch tensor of an entry: it shares the memory of `data`, unless that is not aligned."""
    import torch

    dtype = getattr(torch, _NAMES[entry.dtype], None)
    if dtype is None:
        raise BadTensors(f"{entry.name!r} is {_NAMES[entry.dtype]}, which this torch does not have")
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    raw = np.frombuffer(data[entry.begin : entry.end], np.uint8)
    if raw.ctypes.data % SIZES[entry.dtype]:
        raw = raw.copy()
    # Torch has no read-only tensors and warns about memory that is; through ctypes it does not ask.
    memory: Any = (ctypes.c_ubyte * raw.nbytes).from_address(raw.ctypes.data)
    # The tensor keeps this object alive, and this object what it looks at.
    memory.owner = raw
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(entry.shape)
