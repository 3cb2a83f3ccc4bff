"""Public reports on waits that never end, lose groups, or spin."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from services.runtime.clock import ManualClock
from services.runtime.errors import Code
from tests.buffer.helpers import (
    CALL_S,
    Buffer,
    Caller,
    output,
    refused,
    refused_stream,
    result,
    running_buffer,
    seconds,
)
from tests.buffer.process import buffer_process
from turnout.buffer.v1 import buffer_pb2 as pb


async def test_h01_a_lost_final_update_ends_as_a_failed_group_and_one_refill(timed: Buffer, clock: ManualClock) -> None:
    """A blocking sample had no time-out, and one group whose worker died kept it waiting for hours."""
    caller = timed.caller()
    await caller.create(size=4, lease_times=pb.LeaseTimes(claim=seconds(60.0)))
    await caller.open()
    await caller.add(*[f"g{number}" for number in range(8)])
    claims = await caller.claim(32)
    for claim in claims[:7]:
        await caller.finish_claim(claim)
    stuck = claims[7]
    await caller.finish(*[result(stuck.group_id, index, token=stuck.token) for index in range(3)])

    waiting = asyncio.create_task(caller.wait(8, max_wait=2.0))
    await timed.until_parked(1)
    await clock.advance(2.0)
    told = await waiting
    assert (told.outcome, told.refills) == ("TIMED_OUT", [])
    counts = told.done.depth.counts
    assert (counts.pending, counts.running, counts.finished, counts.failed) == (0, 1, 7, 0)
    assert told.done.depth.oldest_running_group_id == stuck.group_id
    assert told.done.depth.oldest_running_for == seconds(2.0)

    await clock.advance(55.0)
    waiting = asyncio.create_task(caller.wait(8, max_wait=CALL_S))
    await timed.until_parked(1)
    await clock.advance(3.0)
    await caller.finish_claim(await refill(caller))
    told = await waiting
    assert (told.outcome, [due.count for due in told.refills]) == ("REACHED", [1])
    assert dict(told.done.evictions.metrics) == {"training/rollout_failure/evicted_samples": 1.0}


async def refill(caller: Caller) -> pb.Claim:
    """Serve the refill that the parked wait is shown, as a second thread of the trainer would."""
    async with asyncio.timeout(CALL_S):
        while not (await caller.depth()).unpaid_credits:  # noqa: ASYNC110 - the credit is read, not announced
            await asyncio.sleep(0.01)
    await caller.add("fresh")
    [claim] = await caller.claim(4)
    return claim


async def test_h03_an_exhausted_source_ends_the_wait_at_once(caller: Caller) -> None:
    """The trainer waited for groups that nobody would ever produce."""
    await caller.create()
    await caller.open()
    await caller.add(*[f"g{number:02}" for number in range(13)], end_of_prompts=True)
    await caller.finish(*[result(f"g{number:02}", 0) for number in range(13)])
    assert (await caller.wait(8, max_wait=CALL_S)).outcome == "REACHED"
    assert len(await caller.take(8)) == 8
    told = await caller.wait(8, max_wait=CALL_S)
    assert (told.outcome, told.done.depth.sampleable, told.done.depth.supply_ended) == ("EXHAUSTED", 5, True)
    assert "no more prompts will come" in told.done.reason
    assert (await caller.sample(8, max_wait=CALL_S)).outcome == "EXHAUSTED"
    assert len(await caller.take(5)) == 5


async def test_h03_a_refill_nobody_can_serve_is_declined_once(caller: Caller) -> None:
    """No hot loop asks the source for more."""
    await caller.create(group_filter_metric="reward")
    await caller.open()
    await caller.finish_new("flat", rewards=(1.0, 1.0))
    refills = 0
    outcome = None
    async for event in caller.wait_call(1, max_wait=CALL_S):
        if event.WhichOneof("event") == "refill_due":
            refills += 1
            request = pb.DeclineRefillRequest(**caller.place, epoch=1, refill_claim_id=event.refill_due.refill_claim_id)
            assert [(await caller.stub.DeclineRefill(request)).cancelled for _ in range(2)] == [1, 0]
        elif event.WhichOneof("event") == "done":
            outcome = event.done.outcome
    assert (refills, outcome) == (1, pb.WAIT_OUTCOME_EXHAUSTED)


async def test_h04_the_strictest_threshold_is_defined_and_a_stricter_one_refused(caller: Caller) -> None:
    """With permitted age zero every finished episode was evicted on arrival and sampling waited for ever."""
    error = await refused(caller.create(staleness=pb.Staleness(max_versions=0)))
    assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "config.staleness.max_versions")
    await caller.create(staleness=pb.Staleness(max_versions=1))
    await caller.open()
    await caller.finish_new("older", step=12)
    await caller.finish_new("same", step=13)
    assert (await caller.sample(1, step=13)).ids == ["same"]


async def test_h04_evicting_and_refilling_is_paced_counted_and_comes_to_an_end(tmp_path: Path) -> None:
    """Whatever finished was stale already: trainer and buffer went round as fast as they could, and never said why."""
    async with buffer_process(tmp_path) as process:
        caller = process.caller()
        await caller.create(staleness=pb.Staleness(max_versions=1))
        await caller.open()
        added = 0
        refills: list[int] = []
        done = None

        async def work(count: int, refill_claim_id: str | None = None) -> None:
            # Workers keep to step 12 while the trainer waits at 13.
            nonlocal added
            names = [f"g{added + number}" for number in range(count)]
            added += count
            await caller.add(*names, step=12, refill_claim_id=refill_claim_id)
            for claim in await caller.claim(count):
                await caller.finish_claim(claim)

        await work(4)
        before = cpu_seconds(process.process.pid)
        async for event in caller.wait_call(4, step=13, max_wait=3.0):
            match event.WhichOneof("event"):
                case "refill_due":
                    refills.append(event.refill_due.count)
                    await work(event.refill_due.count, event.refill_due.refill_claim_id)
                case "done":
                    done = event.done
        cpu = cpu_seconds(process.process.pid) - before
    assert done is not None
    assert done.outcome == pb.WAIT_OUTCOME_TIMED_OUT
    assert "mostly stale" in done.reason
    assert 50 <= done.evictions.evicted == added
    assert sum(refills) <= added
    assert len(refills) <= 31, "one claim in a tenth of a second"
    assert cpu < 0.2 * 3.0


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_h11_surplus_stays_and_batches_are_disjoint(buffer: Buffer, caller: Caller) -> None:
    """Each poll drained the whole finished queue and threw away what it did not return."""
    await caller.create()
    await caller.open()
    await caller.finish_new(*[f"g{number}" for number in range(10)])
    depths = []
    taken: list[str] = []
    for batch, outcome in ((4, "REACHED"), (4, "REACHED"), (4, "TIMED_OUT"), (2, "REACHED")):
        told = await caller.sample(batch)
        assert told.outcome == outcome
        taken += told.ids
        depths.append((await caller.depth()).sampleable)
    assert depths == [6, 2, 2, 0]
    assert taken == [f"g{number}" for number in range(10)]

    await caller.finish_new(*[f"h{number}" for number in range(6)])
    both = await asyncio.gather(caller.sample(4), caller.sample(4))
    assert sorted(told.outcome for told in both) == ["REACHED", "TIMED_OUT"]
    assert (await caller.depth()).sampleable == 2
    rest = await caller.sample(2)
    assert sorted([*both[0].ids, *both[1].ids, *rest.ids]) == [f"h{number}" for number in range(6)]


async def test_h24_drop_counts_slow_groups_and_wait_samples_them(buffer: Buffer) -> None:
    """Discard-and-retry on staleness starves prompts that need long rollouts, without a word about it."""
    for strategy in (pb.STALENESS_STRATEGY_DROP, pb.STALENESS_STRATEGY_WAIT):
        caller = buffer.caller(f"run{strategy}")
        await caller.create(staleness=pb.Staleness(max_versions=2, strategy=strategy))
        await caller.open()
        await caller.add(*[f"slow{number}" for number in range(4)], step=1)
        slow = await caller.claim(4)
        trained: list[str] = []
        refills: dict[str, int] = {}
        for step in range(1, 31):
            fast = [f"fast{step}.{number}" for number in range(3)]
            await caller.finish_new(*fast, step=step)
            if step == 4:
                for claim in slow:
                    await caller.finish_claim(claim)
            told = await caller.sample(2, step=step)
            refills.update({due.refill_claim_id: due.count for due in told.refills})
            if told.outcome == "REACHED":
                trained += await caller.commit(told.done.lease_id)
        ledger = await caller.ledger()
        reasons = {count.reason: count.count for count in ledger.evicted_by_reason}
        sampled_slow = [name for name in trained if name.startswith("slow")]
        if strategy == pb.STALENESS_STRATEGY_WAIT:
            assert sampled_slow == [f"slow{number}" for number in range(4)], "oldest first, ties stable"
            assert ledger.evicted == 0
        else:
            # Each that was dropped is told by id, with its reason, and replaced by one fresh prompt, not by itself.
            events = await evicted_groups(caller)
            assert sampled_slow == []
            assert [name for name in events if name.startswith("slow")] == [f"slow{number}" for number in range(4)]
            assert reasons == {pb.EVICTION_REASON_STALE: len(events)}
            assert sum(refills.values()) == ledger.evicted == ledger.credits_created == len(set(events))


async def evicted_groups(caller: Caller) -> list[str]:
    """Ids of the evicted groups, from the event stream."""
    found: list[str] = []
    call = caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id=caller.run_id, from_sequence=1))
    last = (await caller.stub.ListGroups(pb.ListGroupsRequest(**caller.place))).event_sequence
    async for answer in call:
        found += [event.group_id for event in answer.events if event.kind == pb.GROUP_EVENT_KIND_EVICTED]
        if answer.events[-1].sequence >= last:
            break
    call.cancel()
    return found


@pytest.mark.parametrize("capacity", [1, 2, 3])
async def test_h06_a_small_shared_limit_starves_no_worker(caller: Caller, capacity: int) -> None:
    """A global limit was divided by the workers, gave zero, and a worker refused work for ever."""
    await caller.create(
        train_batch_size=capacity,
        staleness=pb.Staleness(max_versions=1, strategy=pb.STALENESS_STRATEGY_GATE),
        group_filter_metric="reward",
    )
    await caller.open()
    batch = min(capacity, 2)
    served = 0
    trained: list[str] = []

    def done(step: int) -> bool:
        return sum(name.startswith(f"s{step}.") for name in trained) >= batch

    for step in range(1, 21):
        await caller.add(*[f"s{step}.{number}" for number in range(2 * batch)], step=step, size=2)

        async def work(worker: str, step: int = step) -> None:
            nonlocal served
            while not done(step):
                for claim in await caller.claim(2, max_wait=0.05, worker=worker):
                    # Every second group is worthless and gets rejected.
                    served += 1
                    flat = served % 2 == 0
                    for item in claim.trajectories:
                        reward = 1.0 if flat else float(item.index)
                        await caller.finish(result(claim.group_id, item.index, output(reward), token=claim.token))

        async def train(step: int = step) -> None:
            while not done(step):
                told = await caller.sample(1, step=step, max_wait=CALL_S)
                assert told.outcome == "REACHED"
                # A group left over from the step before counts for this one.
                trained.extend(f"s{step}.{name}" for name in await caller.commit(told.done.lease_id))

        async with asyncio.timeout(CALL_S):
            await asyncio.gather(train(), *[work(f"w{number}") for number in range(4)])
    assert len(trained) == 20 * batch
    assert (await caller.ledger()).committed == 20 * batch


async def test_h06_a_limit_of_zero_is_refused_at_the_start(caller: Caller) -> None:
    for config, field in (
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"caps": pb.Caps(max_groups=0)}, "caps.max_groups"),
    ):
        error = await refused(caller.create(**config))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, f"config.{field}")
    error = await refused_stream(caller.wait_call(1))
    assert error.code is Code.NOT_FOUND


async def test_h24_a_prompt_that_is_dropped_again_and_again_is_named_until_it_is_trained_on(tmp_path: Path) -> None:
    """Sums of evictions do not tell that it is always the same prompts, and always the long ones."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(staleness=pb.Staleness(max_versions=2))
        await caller.open()

        async def add(group_id: str, prompt_id: str, step: int, **rest: Any) -> None:
            group = pb.GroupSpec(group_id=group_id, prompt_id=prompt_id)
            request = pb.AddGroupsRequest(**caller.place, epoch=caller.epoch, step=step, groups=[group], **rest)
            await caller.stub.AddGroups(request)

        running: dict[int, pb.Claim] = {}
        refills: list[str] = []
        for step in range(1, 31):
            await caller.finish_new(*[f"fast{step}.{number}" for number in range(2)], step=step)
            # The slow prompt takes three versions, and its replacement is the same prompt again.
            if step % 3 == 1:
                await add(f"slow.try{step}", "slow", step, refill_claim_id=refills.pop() if refills else None)
                [running[step]] = await caller.claim()
            elif step % 3 == 0:
                await caller.finish_claim(running.pop(step - 2), output(tokens=9000 + step))
            told = await caller.sample(2, step=step)
            refills += [due.refill_claim_id for due in told.refills]
            await caller.commit(told.done.lease_id)
        # Stale only once the next version begins.
        await caller.wait(1, step=31)
        [slow] = (await dropped(caller, 10)).dropped_prompts
        assert (slow.prompt_id, slow.partition, slow.dropped, slow.stale, slow.failed) == ("slow", "train", 10, 10, 0)
        assert (slow.last_group_id, slow.last_born_step, slow.last_length) == ("slow.try28", 28, 9030)
        assert slow.overcount == 0
        assert not (await dropped(caller, 0)).dropped_prompts
        for wrong in (-1, 1001):
            assert (await refused(dropped(caller, wrong))).metadata["field"] == "max_dropped_prompts"
        # One prompt, one drop, one credit: nothing loops by itself.
        ledger = await caller.ledger()
        assert ledger.evicted == ledger.credits_created == 10
        before = await dropped(caller, 10)

    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        caller.epoch = 1
        assert await dropped(caller, 10) == before, "it outlives a restart"
        group = pb.GroupSpec(group_id="at last", prompt_id="slow")
        await caller.stub.AddGroups(pb.AddGroupsRequest(**caller.place, epoch=1, step=31, groups=[group]))
        await caller.finish(result("at last", 0))
        assert (await caller.group("at last")).prompt_id == "slow"
        assert "at last" in await caller.take(1, step=31)
        assert not (await dropped(caller, 10)).dropped_prompts


async def dropped(caller: Caller, limit: int) -> pb.GetLedgerResponse:
    """The ledger with the prompts that were dropped."""
    return await caller.stub.GetLedger(pb.GetLedgerRequest(run_id=caller.run_id, max_dropped_prompts=limit))
