"""kill -9 at any moment under load: every acknowledged effect is there afterwards, and none twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from tests.buffer.helpers import Caller, output, result, seconds
from tests.buffer.process import BufferProcess, buffer_process
from turnout.buffer.v1 import buffer_pb2 as pb

LIVES = 4


@dataclass
class Known:
    """What the callers were told, over all lives; `unsure`: asked for, and the answer was lost."""

    added: set[str] = field(default_factory=set)
    unsure_added: dict[str, str] = field(default_factory=dict)
    finished: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    unsure_leases: set[str] = field(default_factory=set)
    sampled: Counter[str] = field(default_factory=Counter)
    numbers: int = 0


async def add(caller: Caller, known: Known) -> None:
    """Add prompts, repeating those whose answer was lost under the same request_id."""
    for name, request_id in list(known.unsure_added.items()):
        await caller.add(name, request_id=request_id, prompt=name.encode())
        known.added.add(name)
        del known.unsure_added[name]
    while True:
        known.numbers += 1
        name = f"g{known.numbers}"
        known.unsure_added[name] = f"add-{name}"
        await caller.add(name, request_id=f"add-{name}", prompt=name.encode())
        known.added.add(name)
        del known.unsure_added[name]


async def work(caller: Caller, known: Known) -> None:
    """Claim and finish."""
    while True:
        for claim in await caller.claim(4, max_wait=1.0):
            assert claim.prompt.inline == claim.group_id.encode()
            results = [
                result(claim.group_id, item.index, output(1.0, 1, 0, b"payload"), token=claim.token)
                for item in claim.trajectories
            ]
            outcomes = await caller.finish(*results)
            assert {outcome.code for outcome in outcomes} == {0}
            known.finished[claim.group_id] += len(results)


async def train(caller: Caller, known: Known) -> None:
    """Sample and commit, first what was not known to be committed."""
    for lease_id in list(known.unsure_leases):
        for group_id in await caller.commit(lease_id):
            known.committed[group_id] += 1
        known.unsure_leases.remove(lease_id)
    while True:
        told = await caller.sample(2, max_wait=5.0)
        if told.outcome != "REACHED":
            continue
        known.unsure_leases.add(told.done.lease_id)
        committed = await caller.commit(told.done.lease_id)
        known.unsure_leases.remove(told.done.lease_id)
        for group_id in committed:
            known.committed[group_id] += 1


async def live(buffer: BufferProcess, known: Known, for_s: float) -> None:
    """Load the buffer, and kill it."""
    caller = buffer.caller()
    loops = [add(caller, known), work(caller, known), work(caller, known), train(caller, known)]
    tasks = [asyncio.create_task(loop) for loop in loops]
    await asyncio.wait(tasks, timeout=for_s, return_when=asyncio.FIRST_EXCEPTION)
    await buffer.kill()
    for task in tasks:
        task.cancel()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await task


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_what_was_acknowledged_survives_kill_9_and_nothing_happens_twice(tmp_path: Path, durability: str) -> None:
    """The promise of the service: an answer is never taken back, and a repeat has no second effect."""
    rng = random.Random(durability)
    known = Known()
    flags = ("--durability", durability)
    for life in range(LIVES):
        async with buffer_process(tmp_path, *flags) as buffer:
            caller = buffer.caller()
            if life == 0:
                await caller.create(
                    size=2, max_attempts=50, lease_times=pb.LeaseTimes(claim=seconds(2), sample=seconds(600))
                )
            await live(buffer, known, rng.uniform(0.3, 1.2))
    async with buffer_process(tmp_path, *flags) as buffer:
        caller = buffer.caller()
        for name, request_id in known.unsure_added.items():
            await caller.add(name, request_id=request_id, prompt=name.encode())
            known.added.add(name)
        for lease_id in known.unsure_leases:
            for group_id in await caller.commit(lease_id):
                known.committed[group_id] += 1
        ledger = await caller.ledger()
        present = {group.group_id: group for group in await caller.groups()}
        assert max(known.committed.values()) == 1, "committed twice"
        assert ledger.added == len(known.added), "added twice, or lost"
        assert ledger.evicted == 0
        assert not set(known.committed) & set(present)
        # Batches whose lease nobody ever heard of are in the buffer still, as leased ones.
        assert set(known.committed) | set(present) == known.added
        assert ledger.committed == len(known.committed)
        for group_id, group in present.items():
            done = sum(item.state == pb.TRAJECTORY_STATE_FINISHED for item in group.trajectories)
            assert done >= known.finished[group_id], f"{group_id} lost a result"
            assert done <= 2
        assert known.committed, "nothing happened"
