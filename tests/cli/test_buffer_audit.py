"""`turnout buffer audit`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.buffer.helpers import output, result, running_buffer
from tests.cli.helpers import turnout
from turnout.buffer.v1 import buffer_pb2 as pb


async def test_audit_accounts_for_every_group(tmp_path: Path) -> None:
    """Whoever doubts a run must be able to see where each group went, without a service."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller("a run")
        await caller.create()
        await caller.finish_new("a", "b", "c")
        await caller.take(1)
        await caller.evict("b", refill=True)
        await caller.add("d")
        busy = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path))
        assert busy.returncode == 1
        assert "JOURNAL_LOCKED" in busy.stderr
    done = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    train, val = found["partitions"]
    assert found["balanced"]
    assert (train["run_id"], train["partition"], val["added"]) == ("a run", "train", 0)
    assert (train["added"], train["committed"], train["evicted"]) == (4, 1, 1)
    assert train["evicted_by_reason"] == {"requested": 1}
    assert train["present"] == {"pending": 1, "running": 0, "finished": 1, "failed": 0, "sampled": 0}
    assert train["credits"] == {"created": 1, "paid": 0, "cancelled": 0}
    text = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path))
    assert "4 added = 1 committed + 1 evicted (1 requested) + 2 present (1 pending, 1 finished)" in text.stdout


async def test_h24_audit_names_the_prompts_that_are_dropped_most(tmp_path: Path) -> None:
    """Whoever sees that a run learns nothing from long prompts wants to see which."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller("a run")
        await caller.create(staleness=pb.Staleness(max_versions=1))
        for step in (1, 3, 5):
            group = pb.GroupSpec(group_id=f"try{step}", prompt_id="a long one")
            await caller.stub.AddGroups(pb.AddGroupsRequest(**caller.place, step=step, groups=[group]))
            await caller.finish(result(f"try{step}", 0, output(tokens=1000 * step)))
            await caller.wait(1, step=step + 1)
    done = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path), "--json")
    [found] = json.loads(done.stdout)["partitions"][0]["dropped_prompts"]
    assert (found["prompt_id"], found["dropped"], found["stale"], found["length"]) == ("a long one", 3, 3, 5000)
    text = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path))
    assert "  a long one: dropped 3 times and not trained on since (3 stale, 0 failed); last as try5" in text.stdout


async def test_audit_says_that_there_is_nothing_to_audit(tmp_path: Path) -> None:
    """A wrong directory must not be answered by an empty ledger, nor become a journal."""
    done = await asyncio.to_thread(turnout, "buffer", "audit", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "no journal" in done.stderr
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240
