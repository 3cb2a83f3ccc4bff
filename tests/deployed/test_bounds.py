"""H23: producers outrun the trainer of a deployed buffer."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.buffer.helpers import Caller, output, refused, result
from tests.deployed.site import Site
from turnout.buffer.v1 import buffer_pb2 as pb

pytestmark = [pytest.mark.slow]

CAP, PUSHED, RESULT_BYTES = 64, 10_000, 100_000


@pytest.mark.timeout(900)
async def test_h23_ten_thousand_results_through_a_run_of_sixty_four(site: Site) -> None:
    """The producer pushes 10 000 groups of 100 kB: at first nobody samples, and at the cap it is refused by name; then
    the trainer samples slowly. Memory and disk stay within what the cap means, and every group is accounted for.
    """
    buffer = site.start("buffer", buffer=["--payload-memory=16777216"]).members["buffer"]
    assert buffer.data_dir is not None
    data = os.urandom(RESULT_BYTES)
    most_memory = most_disk = added = refusals = 0
    taken: list[str] = []
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create(caps=pb.Caps(max_groups=CAP))
        before = buffer.resident_bytes
        while added < PUSHED:
            if added - len(taken) == CAP:
                assert (await refused(caller.add(f"g{added}"))).reason == "CAP_GROUPS"
                refusals += 1
                taken += await _train(caller)
                most_memory = max(most_memory, buffer.resident_bytes)
                most_disk = max(most_disk, _disk(buffer.data_dir))
            await caller.add(f"g{added}")
            await caller.finish(result(f"g{added}", 0, output(1.0, payload=data)))
            added += 1
        ledger = await caller.ledger()
    assert refusals >= PUSHED // CAP
    assert (ledger.added, ledger.committed, ledger.evicted) == (PUSHED, len(taken), 0)
    assert taken == [f"g{number}" for number in range(len(taken))]
    print(f"memory {(most_memory - before) >> 20} MiB above the start, disk {most_disk >> 20} MiB at most")
    assert most_memory - before < 256 << 20
    # Two segments of 256 MiB, both ballasts, and a journal that is compacted from 32 MiB on; 1 GB went through.
    assert most_disk < 750 << 20


async def _train(caller: Caller) -> list[str]:
    """Take half of what there may be, and let the bytes go, as a trainer does that has read them."""
    told = await caller.sample(CAP // 2)
    await caller.commit(told.done.lease_id)
    request = pb.ReleasePayloadRequest(run_id=caller.run_id, lease_id=told.done.lease_id)
    await caller.stub.ReleasePayload(request)
    return told.ids


def _disk(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total
