"""Tensors as payloads and back."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as reference

from turnout.client._payloads import CHUNK_BYTES, chunks, put_frames
from turnout.tensors import BadTensors, pack, unpack

DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64"]
DTYPES += ["float64", "complex64"]
LEAVES = st.sampled_from([np.arange(3), np.zeros((2, 0), np.float32), np.float32(1.5), np.array([True, False])])
TREES = st.recursive(LEAVES, lambda below: st.dictionaries(st.text(max_size=4), below, max_size=4), max_leaves=8)

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def packed(tree: Any) -> bytes:
    return b"".join(pack(tree))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) or isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    left = np.asarray(left)
    return bool(left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right))


@given(TREES)
def test_every_tree_comes_back_as_it_was(tree: Any) -> None:
    """A key with a slash, an empty dict or a lone scalar must not change on its way to the trainer."""
    assert same(tree, unpack(packed(tree), "numpy"))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    """Empty and 0-d tensors have no bytes to view, and bool none of its own kind."""
    values = (np.arange(int(np.prod(shape, dtype=int))) % 3).reshape(shape).astype(name)
    back = unpack(packed({"x": values}), "numpy")["x"]
    assert same(values, back)


def test_the_reference_reads_what_we_write_and_the_other_way_round() -> None:
    """Payloads are opened with the tools that people have."""
    tree: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(10, dtype=np.int16),
        "b/c": np.ones((2, 2)),
        "d": np.array(True),
    }
    ours = reference.load(packed({"a": tree["a"], "b": {"c": tree["b/c"]}, "d": tree["d"]}))
    assert same(tree, ours)
    assert same(tree, unpack(reference.save(tree), "numpy"))


def test_odd_memory_is_put_in_order() -> None:
    """A transposed or big-endian array whose memory were sent as it is would arrive as other numbers."""
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    tree = {"t": grid.T, "s": grid[:, ::2], "r": grid[::-1], "big": grid.astype(">i4"), "f": np.asfortranarray(grid)}
    back = unpack(packed(tree), "numpy")
    assert all(np.array_equal(tree[name], back[name]) for name in tree)
    assert back["big"].dtype == np.dtype("<i4")


@pytest.mark.parametrize("tree", [{"x": [1, 2]}, {"x": np.array(["a"])}, {"x": np.array([object()])}, {1: np.zeros(1)}])
def test_what_is_no_tensor_is_refused(tree: Any) -> None:
    """An object array would need pickle."""
    with pytest.raises(TypeError):
        pack(tree)


def test_a_dict_that_contains_itself_is_refused() -> None:
    """Not with a stack overflow."""
    tree: dict[str, Any] = {}
    tree["x"] = tree
    with pytest.raises(ValueError, match="64 deep"):
        pack(tree)


@pytest.mark.parametrize("tree", [{"__metadata__": np.ones(2)}, {"": {"__metadata__": np.ones(2)}}, {"~m": np.ones(1)}])
def test_keys_that_the_format_has_a_use_for(tree: Any) -> None:
    """A tensor taken for the metadata would be lost."""
    assert same(tree, unpack(packed(tree), "numpy"))


def test_views_are_aligned_and_share_the_received_bytes() -> None:
    """A copy of each tensor would double the memory of a trainer that reads 40 GB of payloads."""
    data = packed(
        {"bytes": np.arange(3, dtype=np.uint8), "doubles": np.arange(5.0), "halves": np.arange(3, dtype="f2")}
    )
    back = unpack(data, "numpy")
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(array, whole) and array.flags.aligned for array in back.values())
    assert not back["doubles"].flags.writeable


def test_packing_and_unpacking_64_mb_allocates_next_to_nothing() -> None:
    """Counted: parts are views of the tensors, a chunk is the only copy on the way out, and views come in."""
    size = 64 << 20
    tree = {"tokens": np.ones(size // 8, np.int32), "rest": {"logprobs": np.ones(size // 8, np.float32)}}
    tracemalloc.start()
    try:
        parts = pack(tree)
        packing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        sent = sum(len(chunk) for chunk in chunks(parts))
        sending = tracemalloc.get_traced_memory()[1]
        data = b"".join(parts)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        back = unpack(data, "numpy")
        unpacking = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert sent == len(data) > size
    assert packing < 100_000
    assert sending < 3 * CHUNK_BYTES
    assert unpacking < 100_000
    assert same(tree, back)


def test_parts_are_uploaded_as_chunks_of_their_own_size() -> None:
    """A chunk per tensor would be a thousand messages for a thousand small ones, and too large for a large one."""
    parts = pack({str(number): np.arange(1000) for number in range(1000)})
    frames = list(put_frames("r1", parts))
    assert [len(frame.chunk) for frame in frames[1:-2]] == [CHUNK_BYTES] * (len(frames) - 3)
    assert b"".join(frame.chunk for frame in frames[1:-1]) == b"".join(parts)


GOOD = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def crafted(header: Any, data: bytes = b"abcd", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HOSTILE = {
    "nothing": b"",
    "no header": b"\0" * 7,
    "a header longer than the bytes": crafted({}, length=1000),
    "a header of 2**63 bytes": crafted({}, length=2**63),
    "no JSON": crafted(b"{"),
    "no UTF-8": crafted(b'{"\xff":1}'),
    "a list": crafted([]),
    "JSON nested too deep": crafted(b"[" * 100_000),
    "a name twice": crafted(b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":{}}'),
    "no dtype": crafted({"x": {"shape": [4], "data_offsets": [0, 4]}}),
    "an unknown dtype": crafted({"x": {**GOOD, "dtype": "O"}}),
    "a dtype that is a list": crafted({"x": {**GOOD, "dtype": ["U8"]}}),
    "a negative length": crafted({"x": {**GOOD, "shape": [-4]}}),
    "a fractional length": crafted({"x": {**GOOD, "shape": [4.0]}}),
    "a boolean length": crafted({"x": {**GOOD, "shape": [True, 4]}}),
    "a length of 2**64": crafted({"x": {**GOOD, "shape": [2**64]}}),
    "lengths whose product overflows": crafted(
        {"x": {**GOOD, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, b""
    ),
    "65 dimensions": crafted({"x": {**GOOD, "shape": [1] * 64 + [4]}}),
    "three offsets": crafted({"x": {**GOOD, "data_offsets": [0, 4, 4]}}),
    "offsets behind the end": crafted({"x": {**GOOD, "shape": [8], "data_offsets": [0, 8]}}),
    "offsets the wrong way round": crafted({"x": {**GOOD, "data_offsets": [4, 0]}}),
    "fewer bytes than the shape": crafted({"x": {**GOOD, "dtype": "F64"}}),
    "overlapping tensors": crafted({"x": GOOD, "y": GOOD}),
    "a hole": crafted({"x": {**GOOD, "shape": [2], "data_offsets": [2, 4]}}),
    "bytes of no tensor": crafted({"x": GOOD}, b"abcdefgh"),
    "metadata that is no text": crafted({"__metadata__": {"a": 1}, "x": GOOD}),
    "a tree of an unknown kind": crafted({"__metadata__": {"turnout.tree": "pickle"}, "x": GOOD}),
    "a tensor below a tensor": crafted(
        {
            "__metadata__": {"turnout.tree": "dict"},
            "x": {**GOOD, "shape": [2], "data_offsets": [0, 2]},
            "x/y": {**GOOD, "shape": [2], "data_offsets": [2, 4]},
        }
    ),
    "names nested too deep": crafted({"__metadata__": {"turnout.tree": "dict"}, "a/" * 5000: GOOD}),
    "a broken list of empty dicts": crafted(
        {"__metadata__": {"turnout.tree": "dict", "turnout.empty": "{"}, "x": GOOD}
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(data: bytes) -> None:
    """Payloads come from whoever may call the buffer."""
    with pytest.raises(BadTensors):
        unpack(data, "numpy")


@given(st.binary(max_size=64), st.integers(0, 200))
def test_damaged_bytes_raise_or_give_tensors_that_lie_within(noise: bytes, at: int) -> None:
    """Nothing but BadTensors comes out of the reader, whatever goes in."""
    data = bytearray(packed({"x": np.arange(4), "y": {"z": np.ones(2)}}))
    data[at : at + len(noise)] = noise
    with contextlib.suppress(BadTensors):
        unpack(bytes(data), "numpy")


def test_bfloat16_without_a_numpy_dtype_says_what_to_install() -> None:
    """An array of raw words in its place would be trained on."""
    if importlib.util.find_spec("ml_dtypes") is not None:
        pytest.skip("ml_dtypes is installed")
    with pytest.raises(BadTensors, match="ml_dtypes"):
        unpack(crafted({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}), "numpy")


@needs_torch
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_torch_dtypes_come_back(shape: tuple[int, ...]) -> None:
    """bfloat16 and float8 have no numpy dtype to go by."""
    import torch

    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
    ]
    names += ["complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    tree = {name: (torch.rand(shape) * 4).to(getattr(torch, name)) for name in names}
    back = unpack(packed(tree), "torch")
    for name, tensor in tree.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.is_tensor(unpack(packed(np.arange(3))))


@needs_torch
def test_torch_tensors_in_odd_memory_and_without_data() -> None:
    """Transposed, conjugated and grad-tracking tensors are what training code has at hand."""
    import torch

    grid = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tree = {"t": grid.T, "g": grid.clone().requires_grad_(), "c": torch.tensor([1 + 2j], dtype=torch.complex64).conj()}
    back = unpack(packed(tree), "torch")
    assert torch.equal(back["t"], grid.T)
    assert torch.equal(back["g"], grid)
    assert back["c"].item() == 1 - 2j
    with pytest.raises(TypeError):
        pack(torch.empty(3, device="meta"))
    with pytest.raises(TypeError):
        pack(grid.to_sparse())


@needs_torch
def test_torch_views_share_the_received_bytes_and_keep_them_alive() -> None:
    """A tensor over memory that was freed reads other people's numbers."""
    import gc

    import torch

    data = packed({"x": torch.arange(1 << 20)})
    address = np.frombuffer(data, np.uint8).ctypes.data
    back = unpack(data, "torch")["x"]
    assert address <= back.data_ptr() < address + len(data)
    del data
    gc.collect()
    filler = [bytes([255]) * (8 << 20) for _ in range(4)]
    assert torch.equal(back, torch.arange(1 << 20))
    del filler


@needs_torch
def test_the_torch_reference_reads_what_we_write() -> None:
    """Payloads are opened with the tools that people have."""
    import torch
    from safetensors import torch as torch_reference

    tree = {"a": torch.arange(3).bfloat16(), "b": torch.zeros(2, 2)}
    theirs = torch_reference.load(packed(tree))
    assert all(torch.equal(theirs[name], tree[name]) for name in tree)
    ours = unpack(torch_reference.save(tree), "torch")
    assert all(torch.equal(ours[name], tree[name]) for name in tree)
