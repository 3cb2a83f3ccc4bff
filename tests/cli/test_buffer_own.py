"""`turnout buffer own`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.buffer.helpers import CALL_S, running_buffer
from tests.cli.helpers import turnout
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.stores import UriStore


async def test_a_store_is_cleared_after_its_run(tmp_path: Path) -> None:
    """What was never trained on, or committed in the last step, is left to nobody when the trainer ends."""
    store = UriStore(f"file://{tmp_path}")
    async with running_buffer() as buffer:
        caller = buffer.caller("a run")
        await caller.create()
        refs = [await asyncio.to_thread(store.put, name) for name in (b"a", b"b", b"kept")]
        for ref in refs[:2]:
            group = pb.GroupSpec(group_id=ref.id[-32:], prompt=pb.Payload(ref=ref))
            await caller.stub.AddGroups(pb.AddGroupsRequest(**caller.place, step=0, groups=[group]), timeout=CALL_S)
        await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id="a run"), timeout=CALL_S)
        done = await asyncio.to_thread(turnout, "buffer", "own", "a run", store.root, "--buffer", buffer.host.target)
    assert (done.returncode, done.stdout) == (0, f"2 payloads of a run deleted in {store.root}\n"), done.stderr
    files = await asyncio.to_thread(lambda: [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()])
    assert files == [b"kept"]


def test_a_store_that_cannot_be_opened_is_said() -> None:
    """Before anything is waited for."""
    done = turnout("buffer", "own", "a run", "redis")
    assert done.returncode == 1
    assert "'ray', 'transferqueue', a URI" in done.stderr
