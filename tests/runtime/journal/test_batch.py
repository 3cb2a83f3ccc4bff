"""Records and the chain of batches, without I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal.batch import (
    Batch,
    BrokenChainError,
    Chain,
    Record,
    batch_crc,
    pack_length,
    require_payload,
    stream_prefix,
)

STREAMS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


def _body(records: list[tuple[str, bytes]]) -> bytes:
    return b"".join(stream_prefix(stream) + pack_length(len(payload)) + payload for stream, payload in records)


def _row(previous: int, first: int, count: int, body: bytes) -> tuple[object, ...]:
    return (first, count, previous, batch_crc(previous, first, count, body), body)


@given(st.lists(st.tuples(STREAMS, st.binary(max_size=50)), min_size=1, max_size=20), st.integers(1, 1 << 40))
def test_records_come_back_as_they_went_in(records: list[tuple[str, bytes]], first: int) -> None:
    """A name or payload that holds what looks like a length must not shift what follows."""
    back = list(Batch(first, len(records), _body(records)).records())
    assert back == [Record(first + offset, *record) for offset, record in enumerate(records)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_body_that_does_not_fit_its_count_is_refused(count: int) -> None:
    """Reading past the end, or stopping before it, would invent or drop a record."""
    body = _body([("s", b"one"), ("s", b"two")])
    with pytest.raises(ValueError, match="body of a batch"):
        list(Batch(1, count, body).records())


def test_the_chain_accepts_batches_in_order_from_the_middle_of_one() -> None:
    """A snapshot may end within a batch; reading then begins in the middle of it."""
    first = _row(7, 1, 3, b"abc")
    second = _row(int(str(first[3])), 4, 2, b"de")
    chain = Chain(3)
    assert [chain.accept(row).first for row in (first, second)] == [1, 4]
    assert chain.next_position == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda row: (*row[:4], b"xx"),
        lambda row: (row[0], row[1] + 1, *row[2:]),
        lambda row: (row[0], row[1], row[2] ^ 1, *row[3:]),
        lambda row: (row[0], row[1], -1, *row[3:]),
        lambda row: (*row[:3], row[3] ^ 1, row[4]),
        lambda row: (row[0] + 1, *row[1:]),
        lambda row: (row[0] - 1, *row[1:]),
        lambda row: (*row[:4], "de"),
        lambda row: (None, *row[1:]),
        lambda row: (row[0], 0, *row[2:]),
    ],
)
def test_any_change_of_a_batch_breaks_the_chain(change: object) -> None:
    """Each field takes part in the checksum or in the order; the last good position is that of the batch before."""
    assert callable(change)
    first = _row(7, 1, 3, b"abc")
    second = _row(int(str(first[3])), 4, 2, b"de")
    chain = Chain(1)
    chain.accept(first)
    with pytest.raises(BrokenChainError) as broken:
        chain.accept(change(second))
    assert broken.value.last_good == 3


def test_a_batch_taken_from_another_place_breaks_the_chain() -> None:
    """A page of an older generation of the file can hold a batch that is sound in itself."""
    first = _row(7, 1, 3, b"abc")
    stranger = _row(99, 4, 2, b"de")
    chain = Chain(1)
    chain.accept(first)
    with pytest.raises(BrokenChainError, match="does not follow"):
        chain.accept(stranger)


@pytest.mark.parametrize("stream", ["", "a\nb", "x" * 513, "\ud800"])
def test_a_stream_must_be_an_id(stream: str) -> None:
    """Its length is stored in two bytes and its text as UTF-8."""
    with pytest.raises(TurnoutError) as refused:
        stream_prefix(stream)
    assert refused.value.reason == "BAD_ID"
    assert refused.value.metadata["field"] == "stream"


def test_a_payload_beyond_the_limit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would refuse the row only when it is committed, and fail the journal with it."""
    monkeypatch.setattr("services.runtime.journal.batch.MAX_RECORD_BYTES", 10)
    require_payload(bytes(10))
    with pytest.raises(TurnoutError) as refused:
        require_payload(bytes(11))
    assert (refused.value.code, refused.value.metadata["value"]) == (Code.INVALID_ARGUMENT, "11")
