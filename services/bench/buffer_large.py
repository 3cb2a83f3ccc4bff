"""Figures at 100 000 groups of 8: depth, sampling, memory, recovery, and what holds up the event loop.

Invariants: one run is filled once and serves all figures; the process that is measured for recovery and for the loop is
another one than that which was filled, started on the same files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Final

from google_crc32c import extend

from services.bench import buffer_messages as messages
from services.bench.bare_buffer import CHUNK_BYTES
from services.bench.buffer_bytes import each, put_frames
from services.bench.buffer_calls import THOROUGH, Effort, fill, latencies, sample_64
from services.bench.buffer_world import OURS, Side, World, buffer_spec, connect, world
from services.bench.result import Result
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.runtime.journal import Durability
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.buffer.v1 import buffer_pb2_grpc

DEPTH: Final = "depth_query_100k_over_64"
LARGE: Final = (DEPTH, "sample_64", "bytes_per_trajectory", "recovery_100k", "loop_block_max")

_FULL: Final = "full"
_FEW: Final = "few"

_STREAMED_BYTES: Final = 1 << 30
"""Payload that streams while the loop is watched."""

_READY_WITHIN_S: Final = 300.0


async def measure_large(directory: Path, effort: Effort, wanted: Collection[str]) -> AsyncIterator[Result]:
    """Yield the figures of `wanted`."""
    async with world(directory) as servers:
        await servers.create(messages.create_run(_FEW))
        await fill(servers, _FEW, messages.names("g", 64))
        await servers.create(messages.create_run(_FULL))
        before = resident(servers.ours.pid)
        await fill(servers, _FULL, messages.names("g", effort.groups), payload=messages.SMALL)
        used = resident(servers.ours.pid) - before
        if DEPTH in wanted:
            yield await _depth(servers, effort)
        if "sample_64" in wanted:
            yield await sample_64(servers, effort, _FULL)
        if "bytes_per_trajectory" in wanted:
            trajectories = effort.groups * messages.GROUP
            wire = len(messages.finish(_FULL, messages.names("g", 100))) / (100 * messages.GROUP)
            yield Result("bytes_per_trajectory", "bytes", used / trajectories, wire)
    if "recovery_100k" in wanted:
        yield await _recovery(directory, effort)
    if "loop_block_max" in wanted:
        yield await _loop_block(directory, effort)


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _depth(servers: World, effort: Effort) -> Result:
    call = servers.ours.unary("GetSampleableCount")
    full, few = messages.depth(_FULL), messages.depth(_FEW)
    at_full: list[float] = []
    at_few: list[float] = []
    for _ in range(effort.rounds):
        at_full += await latencies(lambda: call(full), effort.calls)
        at_few += await latencies(lambda: call(few), effort.calls)
    return Result(DEPTH, "ms", 1e3 * median(at_full), 1e3 * median(at_few))


async def _recovery(directory: Path, effort: Effort) -> Result:
    """Seconds from the start of the process until it serves, all groups back, beside the start of a bare server."""
    async with Fleet() as fleet:
        begin = time.perf_counter()
        child = await fleet.start(buffer_spec(directory, Durability.OS), ready_within_s=_READY_WITHIN_S)
        seconds = time.perf_counter() - begin
        await _check_full(child, effort)
        begin = time.perf_counter()
        await fleet.start(ChildSpec("bare", "services.bench.bare_buffer", (str(directory),)))
        return Result("recovery_100k", "s", seconds, time.perf_counter() - begin)


async def _check_full(child: Child, effort: Effort) -> None:
    async with connect(child.target) as channel:
        answer = await Side(child, channel, OURS).unary("GetSampleableCount")(messages.depth(_FULL))
    found = pb.GetSampleableCountResponse.FromString(answer).depth.sampleable
    if found != effort.groups:
        raise RuntimeError(f"{found} of {effort.groups} groups came back")


async def _loop_block(directory: Path, effort: Effort) -> Result:
    """Worst lateness in ms of a timer on the loop while a payload streams and a checkpoint is made, beside idle."""
    spec = replace(buffer_spec(directory, Durability.OS), module="services.bench.buffer_watched")
    spec = replace(spec, arguments=spec.arguments[2:])
    told: asyncio.Queue[float] = asyncio.Queue()

    def on_line(line: str) -> None:
        word, _, seconds = line.partition(" ")
        if word == "worst":
            told.put_nowait(float(seconds))

    async with Fleet() as fleet:
        child = await fleet.start(spec, on_line=on_line, ready_within_s=_READY_WITHIN_S)

        async def worst() -> float:
            child.process.send_signal(signal.SIGUSR1)
            return await told.get()

        async with connect(child.target) as channel:
            await worst()
            begin = time.perf_counter()
            await _stream_and_checkpoint(Side(child, channel, OURS), effort)
            busy = await worst()
            await asyncio.sleep(time.perf_counter() - begin)
            idle = await worst()
    return Result("loop_block_max", "ms", 1e3 * busy, 1e3 * idle)


async def _stream_and_checkpoint(side: Side, effort: Effort) -> None:
    stub: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(side.channel)
    size = _STREAMED_BYTES if effort is THOROUGH else effort.payload_bytes
    # One chunk over and over: only the loop of the buffer is to be busy with a gigabyte.
    chunk = bytes(CHUNK_BYTES)
    crc = 0
    for _ in range(size // CHUNK_BYTES):
        crc = extend(crc, chunk)
    first, middle, _ = put_frames(_FULL, chunk, size=size)
    last = pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=crc)).SerializeToString()
    frames = chain([first], repeat(middle, size // CHUNK_BYTES), [last])
    put = side.up("PutPayload")(each(frames))
    await stub.Checkpoint(pb.CheckpointRequest(run_id=_FULL, step=messages.STEP))
    await put
