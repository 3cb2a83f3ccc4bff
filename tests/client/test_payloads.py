"""Payloads as frames and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import google_crc32c
import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fakes import fail, failing, fake, in_turn
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    INLINE_BYTES,
    BufferClient,
    ClientOptions,
    DataLoss,
    EngineClient,
    RetryPolicy,
    Timeouts,
    Unavailable,
)
from turnout.client._payloads import CHUNK_BYTES, Download, chunks, put_frames, size_of
from turnout.engine.v1 import engine_pb2

QUICK = ClientOptions(retry=RetryPolicy(initial=0.01, maximum=0.02))


def ref_of(data: bytes, name: str = "p") -> buffer_pb2.PayloadRef:
    return buffer_pb2.PayloadRef(id=name, size=len(data), crc32c=google_crc32c.value(data))


def frames_of(payloads: list[bytes], start: int, chunk: int) -> Iterator[buffer_pb2.GetPayloadsResponse]:
    """What a service sends from byte `start` of all payloads on: it passes over every payload that lies before."""
    for index, data in enumerate(payloads):
        if start and start >= len(data):
            start -= len(data)
            continue
        header = buffer_pb2.GetPayloadsHeader(ref_index=index, offset=start)
        yield buffer_pb2.GetPayloadsResponse(header=header)
        for at in range(start, len(data), chunk):
            yield buffer_pb2.GetPayloadsResponse(chunk=data[at : at + chunk])
        yield buffer_pb2.GetPayloadsResponse(end=buffer_pb2.GetPayloadsEnd(crc32c=google_crc32c.value(data)))
        start = 0


@given(
    payloads=st.lists(st.binary(max_size=50), min_size=1, max_size=5),
    chunk=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
def test_a_download_cut_anywhere_resumes_to_the_same_bytes(payloads: list[bytes], chunk: int, cuts: list[int]) -> None:
    """A torn stream must cost no payload, and no byte twice."""
    refs = [ref_of(data, str(number)) for number, data in enumerate(payloads)]
    download = Download(refs)
    got: list[bytes] = []
    for cut in [*cuts, 10_000]:
        left, start = download.resume()
        sent = [payloads[int(ref.id)] for ref in left]
        answers = (download.take(frame) for frame in itertools.islice(frames_of(sent, start, chunk), cut))
        got.extend(data for data in answers if data is not None)
    assert got == payloads
    assert download.complete


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:-1],
        lambda data: data + b"x",
    ],
    ids=["flipped bit", "short", "long"],
)
def test_damaged_bytes_are_never_given_out(spoil: Any) -> None:
    """A trainer that trains on damaged tokens notices nothing."""
    data = b"token ids"
    download = Download([ref_of(data)])
    download.take(buffer_pb2.GetPayloadsResponse(header=buffer_pb2.GetPayloadsHeader()))
    download.take(buffer_pb2.GetPayloadsResponse(chunk=spoil(data)))
    with pytest.raises(DataLoss):
        download.take(buffer_pb2.GetPayloadsResponse(end=buffer_pb2.GetPayloadsEnd(crc32c=google_crc32c.value(data))))


def test_frames_out_of_order_are_refused() -> None:
    """Bytes of one payload must not end up in another."""
    download = Download([ref_of(b"one"), ref_of(b"two")])
    with pytest.raises(DataLoss):
        download.take(buffer_pb2.GetPayloadsResponse(header=buffer_pb2.GetPayloadsHeader(ref_index=1)))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_an_upload_has_small_chunks_and_the_checksum_of_all(size: int) -> None:
    """A chunk above the limit is refused; a checksum over the last chunk only finds nothing."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    frames = list(put_frames("r1", data))
    assert frames[0].header.size == size
    assert b"".join(frame.chunk for frame in frames[1:-1]) == data
    assert all(0 < len(frame.chunk) <= CHUNK_BYTES for frame in frames[1:-1])
    assert frames[-1].end.crc32c == google_crc32c.value(data)


def test_buffers_of_any_kind_are_cut_by_bytes() -> None:
    """A float32 memoryview of weights counted in elements would send a quarter of them."""
    view = memoryview(bytes(16)).cast("f")
    assert size_of(view) == 16
    assert b"".join(chunks(view)) == bytes(16)
    assert size_of([b"ab", bytearray(b"c")]) == 3
    assert list(chunks([b"ab", bytearray(b"c")])) == [b"abc"]


def test_small_payloads_are_inline_and_large_ones_are_uploaded() -> None:
    """A large inline payload is refused by the service; an upload of every small one is a round trip too many."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["PutPayload"] = lambda frames, context: buffer_pb2.PutPayloadResponse(
            ref=buffer_pb2.PayloadRef(id="p1")
        )
        assert client.payload("r1", bytes(INLINE_BYTES), "kind").inline == bytes(INLINE_BYTES)
        assert not service.asked
        uploaded = client.payload("r1", bytes(INLINE_BYTES + 1), "kind")
        assert (uploaded.ref.id, uploaded.content_type) == ("p1", "kind")


def test_an_upload_is_repeated_from_the_start_when_the_service_goes_away() -> None:
    """A half-sent upload has no reference; giving up would fail the trajectory."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["PutPayload"] = in_turn(
            failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
            lambda frames, context: buffer_pb2.PutPayloadResponse(ref=buffer_pb2.PayloadRef(id="p1")),
        )
        assert client.put_payload("r1", b"abc").id == "p1"
        first, second = service.requests("PutPayload")
        assert first == second
        assert [frame.WhichOneof("frame") for frame in second] == ["header", "chunk", "end"]


def test_weights_are_sent_again_when_the_controller_goes_away() -> None:
    """A controller that is restarted in the middle of a move would otherwise end the training job."""
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["UpdateWeights"] = in_turn(
            failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
            lambda frames, context: engine_pb2.UpdateWeightsResponse(operation=engine_pb2.Operation(operation_id="o1")),
        )
        assert client.send_weights("r1", "u1", [b"ab", b"c"]).operation_id == "o1"
        first, second = service.requests("UpdateWeights")
        assert first == second
        assert [frame.WhichOneof("frame") for frame in second] == ["header", "chunk", "end"]


def test_a_torn_download_resumes_at_the_byte_where_it_was_cut() -> None:
    """Fetching 40 GB from the start after each cut never ends."""
    payloads = [b"first", b"second", b"third"]

    def send(request: Any, context: Any) -> Iterator[Any]:
        sent = [payloads[int(ref.id)] for ref in request.refs]
        for number, frame in enumerate(frames_of(sent, request.resume_at, 2)):
            if len(sent) == 3 and number == 7:
                fail(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")
            yield frame

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["GetPayloads"] = send
        refs = [ref_of(data, str(number)) for number, data in enumerate(payloads)]
        assert list(client.get_payloads("r1", refs, lease_id="l1")) == payloads
        asked = [(len(request.refs), request.resume_at) for request in service.requests("GetPayloads")]
        assert asked == [(3, 0), (2, 2)]
        assert list(client.get_payloads("r1", [], lease_id="l1")) == []


def test_a_download_that_ends_too_early_again_and_again_is_an_error() -> None:
    """A service that forgot the payload but not the call must not be asked for ever."""
    options = ClientOptions(timeouts=Timeouts(transfer=0.3), retry=RetryPolicy(initial=0.01, maximum=0.02))
    with fake("buffer") as service, BufferClient(service.target, options) as client:
        service.script["GetPayloads"] = lambda request, context: iter(())
        with pytest.raises(Unavailable, match="STREAM_ENDED"):
            list(client.get_payloads("r1", [ref_of(b"data", "0")], lease_id="l1"))
        assert len(service.requests("GetPayloads")) > 2


def test_weights_travel_with_size_checksum_and_wave() -> None:
    """The engine compares all three before it takes a byte for a weight."""
    data = bytes(range(200)) * 10_000
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["UpdateWeights"] = lambda frames, context: engine_pb2.UpdateWeightsResponse(
            operation=engine_pb2.Operation(operation_id="op-1")
        )
        operation = client.send_weights("r1", "u1", data, epoch=3, replica_ids=["a"], wave_index=1)
        assert operation.operation_id == "op-1"
        (frames,) = service.requests("UpdateWeights")
        header = frames[0].header
        assert (header.size, header.epoch, header.update_id, header.wave_index) == (len(data), 3, "u1", 1)
        assert b"".join(frame.chunk for frame in frames[1:-1]) == data
        assert frames[-1].end.crc32c == google_crc32c.value(data)
