"""Figures of payloads beside TransferQueue, which verl moves its own by.

Invariants: the same bytes, one payload of the size that the other figures move, put and got by one caller in turns; a
put has ended when the other side has the bytes, a get when the caller can read them. TransferQueue runs in a Ray
cluster of its own, which listens on loopback and ends with the bench; without it the figures are skipped, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any, Final

from services.bench import buffer_messages as messages
from services.bench.buffer_bytes import check_bytes, each, put_frames, sampled
from services.bench.buffer_calls import Effort, drain
from services.bench.buffer_world import World
from services.bench.result import Result, Skipped
from turnout.buffer.v1 import buffer_pb2 as pb

PUT: Final = "payload_put_over_transferqueue"
GET: Final = "payload_get_over_transferqueue"
FIGURES: Final = (PUT, GET)

_PARTITION: Final = "turnout-bench"
_COLUMN: Final = "payload"
_CPUS: Final = 8
"""As many as its actors ask for, whatever the machine has: with fewer they wait for each other."""

_OBJECT_STORE_BYTES: Final = 400 << 20
_MB: Final = 1e6


async def beside_transferqueue(world: World, effort: Effort) -> AsyncIterator[Result | Skipped]:
    """Yield both figures, in megabytes per second."""
    missing = [name for name in ("ray", "torch", "transfer_queue") if find_spec(name) is None]
    if missing:
        for name in FIGURES:
            yield Skipped(name, f"{', '.join(missing)} not installed: pip install 'turnout[transferqueue]'")
        return
    with contextlib.ExitStack() as stack:
        queue = await asyncio.to_thread(stack.enter_context, _transferqueue())
        for result in await _measure(world, effort, queue):
            yield result


async def _measure(world: World, effort: Effort, queue: Any) -> list[Result]:
    run_id = "payload-transferqueue"
    await world.create(messages.create_run(run_id, group=1))
    data = os.urandom(effort.payload_bytes)
    frames = put_frames(run_id, data)
    puts: tuple[list[float], list[float]] = ([], [])
    gets: tuple[list[float], list[float]] = ([], [])
    for number in range(effort.rounds):
        begin = time.perf_counter()
        answer = await world.ours.up("PutPayload")(each(frames))
        puts[0].append(time.perf_counter() - begin)
        ref = pb.PutPayloadResponse.FromString(answer).ref
        lease_id = await sampled(world, run_id, number, ref)
        request = pb.GetPayloadsRequest(run_id=run_id, lease_id=lease_id, refs=[ref]).SerializeToString()
        begin = time.perf_counter()
        answers = await drain(world.ours.down("GetPayloads")(request))
        gets[0].append(time.perf_counter() - begin)
        check_bytes(answers, data)
        put, got = await asyncio.to_thread(_through, queue, f"payload-{number}", data)
        puts[1].append(put)
        gets[1].append(got)
    await world.drop(run_id)
    size = len(data) / _MB
    return [
        Result(name, "MB/s", size / median(ours), size / median(theirs))
        for name, (ours, theirs) in zip(FIGURES, (puts, gets), strict=True)
    ]


def _through(queue: Any, key: str, data: bytes) -> tuple[float, float]:
    """Seconds of a put and of a get of the same bytes."""
    import torch

    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    begin = time.perf_counter()
    queue.kv_put(key=key, partition_id=_PARTITION, fields={_COLUMN: row})
    put = time.perf_counter() - begin
    begin = time.perf_counter()
    answer = queue.kv_batch_get(keys=[key], partition_id=_PARTITION, select_fields=[_COLUMN])
    (got_row,) = answer[_COLUMN].unbind()
    got = time.perf_counter() - begin
    if not torch.equal(got_row, row):
        raise RuntimeError("a payload came back changed from TransferQueue")
    queue.kv_clear(keys=[key], partition_id=_PARTITION)
    return put, got


@contextlib.contextmanager
def _transferqueue() -> Iterator[Any]:
    import ray
    import transfer_queue

    ray.init(
        num_cpus=_CPUS,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="ERROR",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        transfer_queue.init()
        try:
            yield transfer_queue
        finally:
            transfer_queue.close()
    finally:
        ray.shutdown()
