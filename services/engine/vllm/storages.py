"""Memory that is given back and taken again under live tensors.

Invariants: a storage that is freed keeps its address in every view, so a model whose weights come back computes as
before; one storage is counted once, however many tensors share it; what is freed goes back to the operating system,
not to the allocator's own stock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterable
from typing import Any, Final

import torch

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Storages:
    """The storages behind some tensors, resident or freed; sizes are those at the time of the last `free`."""

    def __init__(self) -> None:
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._copy: Any = None

    @property
    def resident(self) -> bool:
        """Whether there is memory behind the tensors."""
        return not self._freed

    def free(self, tensors: Iterable[torch.Tensor], *, keep_copy: bool) -> int:
        """Give the memory back and return its bytes; nothing happens if it is given back already.

        A copy is a file without a name, so a process that is killed leaves nothing behind.
        """
        if self._freed:
            return 0
        storages = unique(tensors)
        if keep_copy:
            self._copy = tempfile.TemporaryFile(prefix="turnout-weights-")  # noqa: SIM115 - open until the refill
            for storage in storages:
                self._copy.write(_view(storage))
        self._freed = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        trim()
        return sum(size for _, size in self._freed)

    def refill(self) -> None:
        """Take the memory again, with the content of the copy if there is one, else with zeros."""
        copy, self._copy = self._copy, None
        freed, self._freed = self._freed, []
        with contextlib.closing(copy) if copy is not None else contextlib.nullcontext():
            if copy is not None:
                copy.seek(0)
            for storage, size in freed:
                storage.resize_(size)
                if copy is None:
                    torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
                elif copy.readinto(_view(storage)) != size:
                    raise RuntimeError("the copy of the weights is shorter than the weights")


def unique(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage with memory behind it once, in the order of the tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind these tensors now."""
    return sum(storage.nbytes() for storage in unique(tensors))


def resident_bytes() -> int:
    """Bytes of physical memory that this process holds (resident set size, Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def trim() -> None:
    """Have glibc give freed memory back to the operating system; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _view(storage: torch.UntypedStorage) -> memoryview:
    # Not through numpy, which would make the storage one that can never be resized.
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
