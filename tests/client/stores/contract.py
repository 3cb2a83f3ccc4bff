"""What every payload store has to do, whatever it is made of."""

from __future__ import annotations

import os
from collections.abc import Callable

import google_crc32c
import pytest

from turnout.buffer.v1 import buffer_pb2
from turnout.client import DataLoss, NotFound
from turnout.stores import PayloadStore

SIZES = [0, 1, 1000, 300_000, 5 << 20]


def keeps_what_it_is_given(store: PayloadStore) -> None:
    """Bytes of every kind and size come back, one by one and together, with size and CRC32C in the reference."""
    kept: list[tuple[buffer_pb2.PayloadRef, bytes]] = []
    for size in SIZES:
        data = os.urandom(size)
        ref = store.put(data)
        assert (ref.store, ref.size, ref.crc32c) == (store.name, size, google_crc32c.value(data))
        kept.append((ref, data))
    head, tail = b"head", bytearray(b"tail" * 100_000)
    kept.append((store.put([head, memoryview(tail), b""]), head + bytes(tail)))
    kept.append((store.put(memoryview(bytearray(b"one view"))), b"one view"))
    assert len({ref.id for ref, _ in kept}) == len(kept)
    for ref, data in kept:
        (got,) = store.get([ref])
        assert bytes(got) == data
    assert [bytes(got) for got in store.get([ref for ref, _ in kept])] == [data for _, data in kept]
    assert store.get([]) == []
    store.delete([ref.id for ref, _ in kept])


def forgets_what_is_deleted(store: PayloadStore) -> None:
    """Deleting is for good and may be repeated; what is not there is named."""
    kept, gone = store.put(b"kept"), store.put(b"gone")
    store.delete([gone.id])
    store.delete([gone.id])
    store.delete([])
    for refs in ([gone], [kept, gone]):
        with pytest.raises(NotFound, match="PAYLOAD_NOT_FOUND") as caught:
            store.get(refs)
        assert caught.value.metadata["id"] == gone.id
    assert bytes(store.get([kept])[0]) == b"kept"
    store.delete([kept.id])


def gives_out_nothing_but_what_the_reference_says(store: PayloadStore, change: Callable[[str], str]) -> None:
    """A reference of other bytes, or one with another size, is refused. `change` makes an id of a wrong form."""
    ref = store.put(b"some bytes")
    for field, value in (("size", ref.size - 1), ("size", ref.size + 1), ("crc32c", ref.crc32c ^ 1)):
        wrong = buffer_pb2.PayloadRef()
        wrong.CopyFrom(ref)
        setattr(wrong, field, value)
        with pytest.raises(DataLoss, match="PAYLOAD_DAMAGED"):
            store.get([wrong])
    store.delete([ref.id])
    odd = buffer_pb2.PayloadRef(id=change(ref.id), store=store.name, size=1)
    with pytest.raises(Exception, match="BAD_PAYLOAD_ID"):
        store.get([odd])
    with pytest.raises(Exception, match="BAD_PAYLOAD_ID"):
        store.delete([odd.id])
