"""Epochs, leases, waits and refill of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from services.buffer.domain import access, leases
from services.buffer.domain.caps import Caps
from services.buffer.domain.config import LeaseTimes, Strategy
from services.buffer.domain.expiry import expire, expired, next_expiry
from services.buffer.domain.group import GroupState
from services.buffer.domain.leases import Lease
from services.buffer.domain.moment import Moment
from services.buffer.domain.outputs import InlinePayload, Payload
from services.buffer.domain.partition import GroupSpec
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.domain.results import FailureKind
from services.buffer.domain.run import Run
from services.buffer.domain.runs import Runs
from services.buffer.domain.waits import WaitEnd, WaitOutcome
from services.runtime.errors import Code, TurnoutError
from tests.buffer.domain.model import World, config, output

SHORT = LeaseTimes(claim=1000.0, sample=10.0, payload=5.0)


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(TurnoutError) as caught:
        call()
    return caught.value.reason


def leased(end: WaitEnd | None) -> Lease:
    assert end is not None
    assert end.outcome is WaitOutcome.REACHED
    assert end.lease is not None
    return end.lease


def epoch_world() -> World:
    world = World(config(lease_times=SHORT))
    world.run.open_epoch(None, world.at)
    return world


def test_epochs_only_rise_and_fence() -> None:
    world = World()
    run = world.run
    run.check_epoch(None)
    run.check_epoch(0)
    assert reason(lambda: run.check_epoch(1)) == "UNKNOWN_EPOCH"
    run.open_epoch(5, world.at)
    run.check_epoch(5)
    assert [reason(partial(run.check_epoch, given)) for given in (None, 4, 6)] == [
        "STALE_EPOCH",
        "STALE_EPOCH",
        "UNKNOWN_EPOCH",
    ]
    assert reason(lambda: run.open_epoch(5, world.at)) == "STALE_EPOCH"
    run.open_epoch(None, world.at)
    assert run.state.epoch == 6


def test_an_epoch_never_outgrows_its_field() -> None:
    """A trainer after one that asked for the last int64 made a run that could not be shown, and hid all others."""
    world = World()
    run = world.run
    assert reason(lambda: run.open_epoch(2**63 - 1, world.at)) == "OUT_OF_RANGE"
    assert run.state.epoch == 0
    run.open_epoch(2**62, world.at)
    assert reason(lambda: run.open_epoch(None, world.at)) == "OUT_OF_RANGE"
    assert run.state.epoch == 2**62


def test_a_new_epoch_takes_back_leases_waits_and_refill_claims() -> None:
    """What the old trainer held would otherwise be lost until its leases run out."""
    world = World(config(group_filter_metric="reward"))
    world.finish_new("flat", rewards=(1.0, 1.0))
    world.finish_new("a", "b", rewards=(1.0, 0.0))
    wait, end, pumped = world.wait(5)
    assert end is None
    assert len(pumped.refills) == 1
    held = [leased(world.sample(1)), leased(world.sample(1))]
    returned, fenced = world.run.open_epoch(None, world.at)
    assert (returned, fenced, world.depth()) == (2, [wait], 2)
    assert reason(lambda: world.run.commit(held[0].lease_id, world.at)) == "LEASE_RELEASED"
    world.run.close_wait(world.partition, wait, world.at)
    _, _, again = world.wait(5)
    assert [claim.claim_id for _, claim in again.refills] == [claim.claim_id for _, claim in pumped.refills]


def test_the_current_step_never_falls() -> None:
    world = World()
    for step, current in ((3, 3), (1, 3), (4, 4)):
        world.run.contact(world.at, step)
        assert world.run.state.step == current


def test_commit_release_and_their_repeats() -> None:
    world = epoch_world()
    world.finish_new("a", "b")
    first, second = leased(world.sample(1)), leased(world.sample(1))
    assert [list(world.run.commit(first.lease_id, world.at)) for _ in range(2)] == [["a"], ["a"]]
    assert reason(lambda: world.run.release(first.lease_id, world.at)) == "LEASE_COMMITTED"
    assert [list(world.run.release(second.lease_id, world.at)) for _ in range(2)] == [["b"], ["b"]]
    assert reason(lambda: world.run.commit(second.lease_id, world.at)) == "LEASE_RELEASED"
    assert reason(lambda: world.run.commit("nope", world.at)) == "LEASE_NOT_FOUND"
    assert reason(lambda: world.run.renew(second.lease_id, world.at)) == "LEASE_RELEASED"
    assert reason(lambda: world.run.release_payload(second.lease_id)) == "LEASE_RELEASED"
    assert (world.depth(), world.partition.ledger().committed) == (1, 1)
    assert "a" not in world.partition.groups
    world.add("a")


def test_a_lease_lives_while_its_epoch_does() -> None:
    world = epoch_world()
    world.finish_new("g")
    lease = leased(world.sample(1))
    world.now = 9.0
    world.run.contact(world.at)
    world.now = 18.0
    assert expire(world.run, expired(world.run, world.at), world.at) == []
    assert world.run.lease_left(lease, world.now) == 1.0
    wait, _, _ = world.wait(5)
    world.now = 50.0
    assert expire(world.run, expired(world.run, world.at), world.at) == [], "a trainer that waits is there"
    world.run.close_wait(world.partition, wait, world.at)
    world.run.close_wait(world.partition, wait, world.at)
    assert next_expiry(world.run) == 60.0
    world.now = 60.0
    assert expire(world.run, expired(world.run, world.at), world.at) == [world.partition]
    assert (world.depth(), reason(lambda: world.run.commit(lease.lease_id, world.at))) == (1, "LEASE_EXPIRED")


def test_a_lease_without_an_epoch_is_extended_by_renewal_alone() -> None:
    """Without an epoch nobody can tell whose calls they are."""
    world = World(config(lease_times=SHORT))
    world.finish_new("g")
    lease = leased(world.sample(1))
    world.now = 8.0
    assert world.run.renew(lease.lease_id, world.at) == 10.0
    world.now = 16.0
    world.run.contact(world.at)
    world.wait(5)
    assert world.run.lease_left(lease, world.now) == 2.0
    world.now = 18.0
    expire(world.run, expired(world.run, world.at), world.at)
    assert world.depth() == 1


def test_payloads_of_a_committed_lease_stay_until_released_or_over() -> None:
    for how in ("released", "over"):
        world = epoch_world()
        specs = [GroupSpec("g", 1, prompt=InlinePayload(b"prompt", 1))]
        world.run.add_groups(world.partition, specs, 0, world.at)
        [claim] = world.claim()
        world.finish(claim, [output(payload=b"answer" * 100)])
        lease = leased(world.sample(1))
        assert reason(partial(world.run.release_payload, lease.lease_id)) == "LEASE_NOT_COMMITTED"
        world.run.commit(lease.lease_id, world.at)
        assert len(access.of_lease(world.run, lease.lease_id).payloads()) == 2
        assert world.run.lease_left(lease, world.now) == 10.0
        if how == "released":
            assert [world.run.release_payload(lease.lease_id) for _ in range(2)] == [606, 0]
        else:
            world.now = 10.0
            world.run.contact(world.at)
            expire(world.run, expired(world.run, world.at), world.at)
        assert (world.run.state.payloads.held, len(world.store)) == (0, 0)
        assert reason(partial(access.of_lease, world.run, lease.lease_id)) == "LEASE_COMMITTED"


def test_a_repeated_request_gets_its_answer_again() -> None:
    world = epoch_world()
    world.finish_new("a", "b", "c", "d")
    first = leased(world.sample(1, request_id="r", fingerprint=b"1"))
    assert leased(world.sample(1, request_id="r", fingerprint=b"1")) is first
    assert reason(lambda: world.sample(2, request_id="r", fingerprint=b"2")) == "REQUEST_ID_REUSED"
    world.run.commit(first.lease_id, world.at)
    with pytest.raises(TurnoutError) as caught:
        world.sample(1, request_id="r", fingerprint=b"1")
    assert (caught.value.code, caught.value.reason) == (Code.ALREADY_EXISTS, "ALREADY_COMMITTED")
    assert caught.value.metadata["lease_id"] == first.lease_id
    second = leased(world.sample(1, request_id="s"))
    world.run.release(second.lease_id, world.at)
    assert reason(lambda: world.sample(1, request_id="s")) == "LEASE_RELEASED"
    leased(world.sample(1, request_id="t"))
    world.now = 100.0
    expire(world.run, expired(world.run, world.at), world.at)
    assert reason(lambda: world.sample(1, request_id="t")) == "LEASE_EXPIRED"


def test_take_and_forget_can_be_repeated_until_its_time_ends() -> None:
    """Otherwise an answer lost on the way would lose the batch."""
    world = epoch_world()
    world.finish_new("a", "b")
    first = leased(world.sample(1, request_id="r", auto_commit=True))
    world.run.commit(first.lease_id, world.at)
    assert leased(world.sample(1, request_id="r", auto_commit=True)) is first
    world.now = 10.0
    expire(world.run, expired(world.run, world.at), world.at)
    assert reason(lambda: world.sample(1, request_id="r", auto_commit=True)) == "ALREADY_COMMITTED"
    assert world.partition.ledger().committed == 1


def test_parked_repeats_of_a_request_get_one_batch() -> None:
    """A client that reconnects while its first call is still parked must not take two batches."""
    world = epoch_world()
    first, _, _ = world.wait(1, sample=True, request_id="r", fingerprint=b"1")
    second, _, _ = world.wait(1, sample=True, request_id="r", fingerprint=b"1")
    assert reason(lambda: world.wait(2, sample=True, request_id="r", fingerprint=b"2")) == "REQUEST_ID_REUSED"
    world.finish_new("a", "b")
    ended = dict(world.pump().ended)
    assert leased(ended[first]) is leased(ended[second])
    assert world.depth() == 1


def test_ended_leases_are_forgotten_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "REMEMBER_LEASES", 2)
    world = epoch_world()
    world.finish_new("a", "b", "c", "d", "e")
    made = [leased(world.sample(1, request_id=f"r{number}")) for number in range(4)]
    for lease in made[:3]:
        world.run.commit(lease.lease_id, world.at)
    assert list(world.run.commit(made[0].lease_id, world.at)) == ["a"], "its payloads are still kept"
    for lease in made[:3]:
        world.run.release_payload(lease.lease_id)
    world.run.commit(made[3].lease_id, world.at)
    assert reason(lambda: world.run.commit(made[0].lease_id, world.at)) == "LEASE_NOT_FOUND"
    again = leased(world.sample(1, request_id="r0"))
    assert again.group_ids == ("e",)
    world.now = leases.REMEMBER_SECONDS + 1.0
    world.run.contact(world.at)
    world.run.commit(again.lease_id, world.at)
    assert reason(lambda: world.run.commit(made[2].lease_id, world.at)) == "LEASE_NOT_FOUND"


def test_waits_are_met_by_target_then_arrival_with_disjoint_batches() -> None:
    world = World()
    big, _, _ = world.wait(3, sample=True)
    first, _, _ = world.wait(2, sample=True)
    second, _, _ = world.wait(2, sample=True)
    watch, _, _ = world.wait(3, trainer=False)
    world.finish_new("a", "b", "c")
    ended = dict(world.pump().ended)
    assert set(ended) == {watch, first}, "who only watches sees the depth before it is consumed"
    assert leased(ended[first]).group_ids == ("a", "b")
    world.finish_new("d")
    [(wait, end)] = world.pump().ended
    assert (wait, leased(end).group_ids) == (second, ("c", "d"))
    world.finish_new("e", "f", "g")
    [(wait, end)] = world.pump().ended
    assert (wait, leased(end).group_ids) == (big, ("e", "f", "g"))


def test_waits_of_different_steps_see_their_own_depth() -> None:
    world = World(config(max_versions=2))
    world.finish_new("old", step=1)
    world.finish_new("new", step=3)
    early, end, _ = world.wait(2, step=2, trainer=False)
    assert end is not None
    assert end.depth.sampleable == 2
    late, end, _ = world.wait(2, step=3, trainer=False)
    assert end is None
    assert world.run.time_out(world.partition, late, world.at).outcome is WaitOutcome.TIMED_OUT
    assert early is not late
    assert "old" in world.partition.groups, "who only watches evicts nothing"


def test_a_target_of_zero_returns_at_once_whatever_holds() -> None:
    world = World(config(max_versions=1, strategy=Strategy.WAIT))
    world.add("g")
    world.claim()
    _, end, _ = world.wait(0)
    assert end is not None
    assert end.outcome is WaitOutcome.REACHED


def test_a_hold_does_not_end_a_wait_but_names_itself_when_time_is_up() -> None:
    world = World(config(max_versions=2, strategy=Strategy.WAIT))
    world.add("slow", step=1)
    [slow] = world.claim()
    world.finish_new("a", step=2)
    wait, end, _ = world.wait(1, step=2)
    assert end is None
    done = world.run.time_out(world.partition, wait, world.at)
    assert (done.outcome, done.depth.sampleable) == (WaitOutcome.HELD, 1)
    assert "'slow' with span 2 holds" in done.reason
    wait, _, _ = world.wait(1, step=2, sample=True)
    world.finish(slow)
    [(met, end)] = world.pump().ended
    assert met is wait
    assert leased(end).group_ids == ("slow",)
    wait, _, _ = world.wait(5, step=2)
    assert world.run.time_out(world.partition, wait, world.at).outcome is WaitOutcome.TIMED_OUT


def test_the_end_of_supply_ends_what_cannot_be_met() -> None:
    world = World()
    world.finish_new("a", "b")
    world.add("c")
    wait3, _, _ = world.wait(3)
    wait4, _, _ = world.wait(4)
    sample4, _, _ = world.wait(4, sample=True)
    world.run.add_groups(world.partition, [], 0, world.at, end_of_prompts=True)
    ended = dict(world.pump().ended)
    assert set(ended) == {wait4, sample4}
    assert {end.outcome for end in ended.values()} == {WaitOutcome.EXHAUSTED}
    assert "no more prompts will come" in ended[wait4].reason
    [claim] = world.claim()
    world.fail(claim)
    [(wait, end)] = world.pump().ended
    assert (wait, end.outcome) == (wait3, WaitOutcome.EXHAUSTED)


def test_new_prompts_reopen_supply_but_a_payment_does_not() -> None:
    world = World(config(group_filter_metric="reward"))
    world.add(end_of_prompts=True)
    world.finish_new("flat", rewards=(1.0, 1.0))
    assert not world.partition.supply_ended
    _, _, pumped = world.wait(1)
    [(_, claim)] = pumped.refills
    world.add(end_of_prompts=True)
    assert world.add("a", refill_claim_id=claim.claim_id) == 0
    assert world.partition.supply_ended
    world.add("b")
    assert not world.partition.supply_ended


def test_declining_a_refill_ends_supply() -> None:
    world = World(config(group_filter_metric="reward"))
    world.finish_new("flat", rewards=(1.0, 1.0))
    wait, _, pumped = world.wait(1)
    [(_, claim)] = pumped.refills
    assert world.run.decline_refill(world.partition, claim.claim_id) == 1
    assert world.run.decline_refill(world.partition, claim.claim_id) == 0
    [(ended, end)] = world.pump().ended
    assert (ended, end.outcome) == (wait, WaitOutcome.EXHAUSTED)
    world.finish_new("flat2", rewards=(1.0, 1.0))
    world.add(end_of_prompts=True)
    _, _, pumped = world.wait(1)
    assert pumped.refills == [], "no prompts are asked for once supply has ended"


def test_a_refill_is_shown_to_one_wait_and_again_to_the_next() -> None:
    world = World(config(group_filter_metric="reward"))
    world.finish_new("f1", "f2", rewards=(1.0, 1.0))
    first, _, pumped = world.wait(1)
    [(told, claim)] = pumped.refills
    assert (told, claim.unpaid) == (first, 2)
    _second, _, pumped = world.wait(1)
    assert pumped.refills == []
    world.run.close_wait(world.partition, first, world.at)
    [(told, again)] = world.pump().refills
    assert again is claim
    watcher, _, pumped = world.wait(1, trainer=False)
    assert pumped.refills == []
    world.run.close_wait(world.partition, watcher, world.at)
    assert world.add("x", "y", refill_claim_id=claim.claim_id) == 0


def test_without_refill_evictions_create_no_credits() -> None:
    world = World(config(group_filter_metric="reward", refill=False))
    world.finish_new("flat", rewards=(1.0, 1.0))
    _, _, pumped = world.wait(1)
    counts = world.run.evict_groups(world.partition, ["flat"], refill=True, at=world.at)
    assert (pumped.refills, world.partition.refill.created, counts.missing) == ([], 0, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ({"target": -1}, Code.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE"),
        ({"target": 0, "sample": True}, Code.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE"),
        ({"target": 11}, Code.FAILED_PRECONDITION, "TARGET_ABOVE_CAPS"),
        ({"target": 1, "step": -1}, Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
        ({"target": 1, "cursor": 1}, Code.INVALID_ARGUMENT, "CURSOR_AHEAD"),
    ],
)
def test_a_wait_that_can_never_be_right_is_refused_at_once(
    arguments: dict[str, object], code: Code, expected: str
) -> None:
    world = World(config(caps=Caps(max_groups=10)))
    with pytest.raises(TurnoutError) as caught:
        world.wait(**arguments)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.reason) == (code, expected)
    assert list(world.partition.waits) == []


def test_a_target_beyond_the_gate_is_refused() -> None:
    """The gate stops handing out work at that depth, so the wait could only run out."""
    world = World(config(max_versions=2, strategy=Strategy.GATE, train_batch_size=4))
    assert reason(lambda: world.wait(9)) == "TARGET_ABOVE_CAPS"
    world.wait(8)


@pytest.mark.parametrize(
    ("specs", "rest", "expected"),
    [
        ([GroupSpec("new"), GroupSpec("new")], {}, "GROUP_EXISTS"),
        ([GroupSpec("new"), GroupSpec("there")], {}, "GROUP_EXISTS"),
        ([GroupSpec("new"), GroupSpec("")], {}, "BAD_ID"),
        ([GroupSpec("new"), GroupSpec("x", 0)], {}, "OUT_OF_RANGE"),
        ([GroupSpec("new"), GroupSpec("x", prompt=Payload("nope", 1, 1))], {}, "PAYLOAD_NOT_FOUND"),
        ([GroupSpec("new"), GroupSpec("x", prompt=InlinePayload(b"12345678901", 1))], {}, "CAP_BYTES"),
        ([GroupSpec(f"n{i}") for i in range(3)], {}, "CAP_GROUPS"),
        ([GroupSpec("new")], {"refill_claim_id": "nope"}, "REFILL_CLAIM_NOT_FOUND"),
        ([GroupSpec("new")], {"step": -1}, "OUT_OF_RANGE"),
        ([GroupSpec("new")] * 100_001, {}, "TOO_MANY_ITEMS"),
        ([GroupSpec(f"g{number}", 65_536) for number in range(3)], {}, "TOO_MANY_TRAJECTORIES"),
    ],
)
def test_groups_are_added_all_or_none(specs: Sequence[GroupSpec], rest: dict[str, object], expected: str) -> None:
    world = World(config(caps=Caps(max_groups=3, max_bytes=10)))
    world.add("there")
    before = (world.partition.ledger(), world.run.state.sequence, world.run.state.payloads.held)
    arguments = {"step": 0, "end_of_prompts": True, **rest}
    call = lambda: world.run.add_groups(world.partition, specs, at=world.at, **arguments)  # type: ignore[arg-type]  # noqa: E731
    assert reason(call) == expected
    assert (world.partition.ledger(), world.run.state.sequence, world.run.state.payloads.held) == before
    assert not world.partition.supply_ended


def test_caps_are_over_all_partitions_and_slots_come_back() -> None:
    world = World(config(caps=Caps(max_groups=2)))
    world.add("a")
    world.name = "val"
    world.add("a")
    assert reason(lambda: world.add("b")) == "CAP_GROUPS"
    world.name = "train"
    world.run.evict_groups(world.partition, ["a"], refill=False, at=world.at)
    world.add("c")


def test_the_ledger_of_a_run_adds_its_partitions() -> None:
    world = World(config(group_filter_metric="reward"))
    world.finish_new("flat", rewards=(1.0, 1.0))
    world.wait(1)
    world.name = "val"
    world.add("v")
    total = world.run.ledger()
    assert total.balanced
    assert (total.added, total.evicted, total.present.pending, total.credits_created) == (2, 1, 1, 1)


def test_who_may_read_what() -> None:
    world = epoch_world()
    specs = [GroupSpec(name, 1, prompt=InlinePayload(name.encode(), 1)) for name in ("a", "b")]
    world.run.add_groups(world.partition, specs, 0, world.at)
    first, second = world.claim(1), world.claim(1)
    world.fail(first[0], FailureKind.INTERRUPTED, [output(payload=b"half")])
    [first_again] = world.claim(1)
    opened = access.of_claim(world.run, first_again.token)
    assert [payload.size for payload in opened] == [1, 4]
    assert reason(lambda: access.of_claim(world.run, first[0].token)) == "STALE_CLAIM"
    access.check_readable(world.run, opened, opened)
    other = access.of_claim(world.run, second[0].token)
    assert reason(lambda: access.check_readable(world.run, opened, other)) == "PAYLOAD_NOT_IN_LEASE"
    assert reason(lambda: access.check_readable(world.run, opened, [Payload("x", 1, 1)])) == "PAYLOAD_NOT_FOUND"
    external = Payload("k", 1, 1, store="ray")
    assert reason(lambda: access.check_readable(world.run, opened, [external])) == "EXTERNAL_PAYLOAD"


def test_runs_are_found_by_id_and_forgotten_whole() -> None:
    runs, store, at = Runs(), MemoryPayloadStore(), Moment(0.0, 0.0)
    for name in ("b", "a"):
        runs.add(Run(name, config(), id_prefix=name, store=store, at=at))
    assert [run.run_id for run in runs] == ["a", "b"]
    assert reason(lambda: runs.add(Run("a", config(), id_prefix="c", store=store, at=at))) == "RUN_EXISTS"
    run = runs.require("a")
    run.add_groups(run.partition("train"), [GroupSpec("g", prompt=InlinePayload(b"x", 0))], 0, at)
    runs.remove(run)
    run.clear()
    assert (runs.get("a"), len(store), reason(lambda: runs.require("a"))) == (None, 0, "RUN_NOT_FOUND")
    assert reason(lambda: run.partition("nope")) == "PARTITION_NOT_FOUND"


def test_a_configuration_is_replaced_as_a_whole_or_not() -> None:
    world = World()
    assert reason(lambda: world.run.update(config(max_attempts=0))) == "OUT_OF_RANGE"
    assert reason(lambda: world.run.update(config(size=2))) == "IMMUTABLE_FIELD"
    assert world.run.state.config.max_attempts == 1
    world.finish_new("g")
    world.run.update(config(max_versions=1))
    world.run.contact(world.at, 5)
    assert world.depth() == 0
    assert world.partition.groups["g"].state is GroupState.FINISHED
