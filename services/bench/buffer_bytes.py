"""Figures of payloads: put and get, in megabytes per second.

Invariants: the same frames go to both sides, in chunks of 1 MiB as the client sends them; the bare side writes to, and
reads from, a file in the same directory; a get reads what the put before it wrote, so both find it in the page cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable
from statistics import median
from typing import Final

from google_crc32c import value

from services.bench import buffer_messages as messages
from services.bench.bare_buffer import CHUNK_BYTES, SYNC
from services.bench.buffer_calls import Effort, check_outcomes, drain
from services.bench.buffer_world import World
from services.bench.result import Result
from turnout.buffer.v1 import buffer_pb2 as pb

_MB: Final = 1e6


async def put_and_get(world: World, effort: Effort, names: tuple[str, str | None], *, sync: bool) -> list[Result]:
    """Put a payload and, if it is named, get it. `names` are those of the results."""
    run_id = "payload"
    await world.create(messages.create_run(run_id, group=1))
    data = os.urandom(effort.payload_bytes)
    frames = put_frames(run_id, data)
    size = len(data) / _MB
    puts: tuple[list[float], list[float]] = ([], [])
    gets: tuple[list[float], list[float]] = ([], [])
    put_name, get_name = names
    for number in range(max(1, effort.rounds)):
        begin = time.perf_counter()
        answer = await world.ours.up("PutPayload")(each(frames))
        puts[0].append(size / (time.perf_counter() - begin))
        ref = pb.PutPayloadResponse.FromString(answer).ref
        begin = time.perf_counter()
        await world.bare.up("Put")(each([SYNC if sync else b"os", *frames[1:-1]]))
        puts[1].append(size / (time.perf_counter() - begin))
        if get_name is not None:
            lease_id = await sampled(world, run_id, number, ref)
            request = pb.GetPayloadsRequest(run_id=run_id, lease_id=lease_id, refs=[ref]).SerializeToString()
            begin = time.perf_counter()
            answers = await drain(world.ours.down("GetPayloads")(request))
            gets[0].append(size / (time.perf_counter() - begin))
            check_bytes(answers, data)
            begin = time.perf_counter()
            await drain(world.bare.down("Get")(b""))
            gets[1].append(size / (time.perf_counter() - begin))
    await world.drop(run_id)
    results = [Result(put_name, "MB/s", median(puts[0]), median(puts[1]))]
    if get_name is not None:
        results.append(Result(get_name, "MB/s", median(gets[0]), median(gets[1])))
    return results


def put_frames(run_id: str, data: bytes, *, size: int | None = None) -> list[bytes]:
    """The frames of a PutPayload of `data`, announced as `size` bytes if more of it will follow."""
    header = pb.PutPayloadHeader(run_id=run_id, size=len(data) if size is None else size)
    frames = [pb.PutPayloadRequest(header=header)]
    frames += [pb.PutPayloadRequest(chunk=data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    frames.append(pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=value(data))))
    return [frame.SerializeToString() for frame in frames]


async def each(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The frames as a stream."""
    for frame in frames:
        yield frame


async def sampled(world: World, run_id: str, number: int, ref: pb.PayloadRef) -> str:
    """Finish a group with the payload and sample it; returns the lease."""
    (group_id,) = ids = messages.names("g", 1, number)
    await world.stub.AddGroups(messages.add(run_id, ids))
    (result,) = messages.results(ids, group=1, payload=0)
    result.outputs[0].payload.ref.CopyFrom(ref)
    request = pb.FinishTrajectoriesRequest(run_id=run_id, partition=messages.PARTITION, results=[result])
    check_outcomes((await world.stub.FinishTrajectories(request)).outcomes)
    answers = await drain(world.ours.down("Sample")(messages.sample(run_id, 1)))
    done = pb.SampleResponse.FromString(answers[-1]).done
    if not done.lease_id:
        raise RuntimeError(f"{group_id} was not sampled: {done.reason}")
    return done.lease_id


def check_bytes(answers: Iterable[bytes], data: bytes) -> None:
    """Raise unless the frames of a GetPayloads carry `data`."""
    frames = [pb.GetPayloadsResponse.FromString(answer) for answer in answers]
    if b"".join(frame.chunk for frame in frames if frame.WhichOneof("frame") == "chunk") != data:
        raise RuntimeError("a payload came back changed")
