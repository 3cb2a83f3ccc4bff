"""A partition under every sequence of calls: hypothesis plays trainer, workers and time against a naive model.

The model keeps each group in a plain dictionary and recomputes what the buffer must say by walking all of them, which
is what the buffer never does.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.buffer.domain import results, work
from services.buffer.domain.claims import Claim
from services.buffer.domain.config import LeaseTimes, Strategy
from services.buffer.domain.expiry import expire, expired
from services.buffer.domain.group import GroupState
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.results import Failure, FailureKind
from services.buffer.domain.trajectory import TrajectoryState
from services.buffer.domain.waits import Wait, WaitOutcome
from services.buffer.wire.outputs import partial_from
from services.runtime.errors import TurnoutError
from tests.buffer.domain.model import World, config, output, result, settle

CLAIM_S = 10.0
SAMPLE_S = 30.0
MAX_ATTEMPTS = 2


@dataclass
class Model:
    """A group as the naive model sees it."""

    born: int
    size: int
    rewards: dict[int, float] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    state: str = "open"


class PartitionMachine(RuleBasedStateMachine):
    """Rules are calls; invariants hold after each of them."""

    strategy = Strategy.DROP
    max_versions: int | None = 2

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            config(
                max_versions=self.max_versions,
                strategy=self.strategy,
                max_attempts=MAX_ATTEMPTS,
                train_batch_size=2,
                group_filter_metric="reward",
                lease_times=LeaseTimes(claim=CLAIM_S, sample=SAMPLE_S),
            )
        )
        self.world.run.open_epoch(None, self.world.at)
        self.groups: dict[str, Model] = {}
        self.step = 0
        self.next_id = 0
        self.committed: list[str] = []
        self.evicted = 0
        self.credits = 0
        self.due_credits: dict[str, int] = {}

        self.claims: list[Claim] = []

    # ----------------------------------------------------------------------------------------------------------- rules

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def add(self, sizes: list[int]) -> None:
        for size in sizes:
            self._add(size)

    def _add(self, size: int, refill_claim_id: str | None = None) -> int:
        self.next_id += 1
        name = f"g{self.next_id}"
        remaining = self.world.add(name, step=self.step, size=size, refill_claim_id=refill_claim_id)
        self.groups[name] = Model(self.step, size)
        self._pump()
        return remaining

    @precondition(lambda self: work.next_group(self.world.partition) is not None)
    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        group = work.next_group(self.world.partition)
        assert group is not None
        ages = [
            (other.born, other.sequence)
            for other in self.world.partition.groups.values()
            if other.live
            and other.pending
            and (other.state is GroupState.RUNNING or work.gate_open(self.world.partition))
        ]
        assert (group.born, group.sequence) == min(ages)
        claim = work.claim(self.world.partition, group, "w", limit, self.world.at)
        self.groups[group.group_id].born = group.born
        self.claims.append(claim)
        self._pump()

    @precondition(lambda self: self._living())
    @rule(data=st.data(), rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
    def finish_all(self, data: st.DataObject, rewards: list[float]) -> None:
        claim = data.draw(st.sampled_from(self._living()))
        for index in sorted(claim.open):
            self._finish(claim, index, rewards[index])
        self._pump()

    @precondition(lambda self: self._living())
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish_one(self, data: st.DataObject, reward: float) -> None:
        claim = data.draw(st.sampled_from(self._living()))
        self._finish(claim, min(claim.open), reward)
        self._pump()

    def _living(self) -> list[Claim]:
        book = self.world.run.state.claims
        return [claim for claim in self.claims if book.get(claim.token.claim_id) is claim]

    def _finish(self, claim: Claim, index: int, reward: float) -> None:
        model = self.groups[claim.group.group_id]
        self.world.finish(claim, [output(reward, 2)], index)
        model.rewards[index] = reward
        if len(model.rewards) == model.size:
            model.state = "finished"

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish_again_or_late(self, data: st.DataObject, reward: float) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        group_id = claim.group.group_id
        for index in range(claim.group.size):
            if index in claim.open and claim in self._living():
                continue
            # Only the same result again is fine; nothing of this has an effect.
            again = result(group_id, index, (output(reward, 2),), claim.token)
            before = self._fingerprint()
            with suppress(TurnoutError):
                settle(self.world.partition, again, self.world.at)
            assert self._fingerprint() == before
        self._pump()

    @precondition(lambda self: self._living())
    @rule(data=st.data(), kind=st.sampled_from(FailureKind), partial=st.booleans())
    def fail(self, data: st.DataObject, kind: FailureKind, partial: bool) -> None:
        claim = data.draw(st.sampled_from(self._living()))
        index = min(claim.open)
        kept = partial_from([output(0.0, 1, 0)], claim.group.group_id, index) if partial else None
        failure = Failure(claim.group.group_id, index, kind, claim.token, "boom", kept)
        results.fail(self.world.partition, failure, self.world.at)
        self._note_failure(claim, kind, index)
        self._pump()

    def _note_failure(self, claim: Claim, kind: FailureKind, index: int) -> None:
        model = self.groups[claim.group.group_id]
        model.failures[index] += kind is not FailureKind.INTERRUPTED
        if kind is FailureKind.PERMANENT or model.failures[index] >= MAX_ATTEMPTS:
            model.state = "failed"
            assert claim.group.state is GroupState.FAILED
        else:
            assert claim.group.live
            model.born = claim.group.born

    @rule(seconds=st.sampled_from([1.0, CLAIM_S, SAMPLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        for claim in self._living():
            until = self.world.run.state.claims.until(claim.token.claim_id)
            if until is not None and until <= self.world.now:
                self.groups[claim.group.group_id].failures.update(claim.open)
        expire(self.world.run, expired(self.world.run, self.world.at), self.world.at)
        self._resync()
        self._pump()

    @rule()
    def service_restarts(self) -> None:
        self.world.restart()
        book = self.world.run.state.claims
        self.claims = [book.get(claim.token.claim_id) or claim for claim in self.claims]

    @rule(by=st.integers(1, 2))
    def next_step(self, by: int) -> None:
        self.step += by
        self.world.run.contact(self.world.at, self.step)
        self._pump()

    @rule(batch=st.integers(1, 3))
    def sample(self, batch: int) -> None:
        expected = self._sampleable(self.step)
        wait, end, pumped = self.world.wait(batch, self.step, sample=True)
        self._note_pump(pumped.refills)
        expected = [name for name in expected if name in self.world.partition.groups]
        self.world.run.close_wait(self.world.partition, wait, self.world.at)
        held = self._holder(self.step) is not None
        if held or len(expected) < batch:
            assert end is None
            return
        assert end is not None
        assert end.outcome is WaitOutcome.REACHED
        assert end.lease is not None
        assert list(end.lease.group_ids) == expected[:batch], "not the oldest, or not stable"
        for name in end.lease.group_ids:
            assert len(self.groups[name].rewards) == self.groups[name].size, "an incomplete group was sampled"
            self.groups[name].state = "sampled"

    @precondition(lambda self: self.world.run.state.leases.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.world.run.state.leases.live)))
        for name in self.world.run.commit(lease_id, self.world.at):
            assert self.groups.pop(name).state == "sampled"
            assert name not in self.committed, "committed twice"
            self.committed.append(name)
        self._pump()

    @precondition(lambda self: self.world.run.state.leases.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.world.run.state.leases.live)))
        for name in self.world.run.release(lease_id, self.world.at):
            self.groups[name].state = "finished"
        self._pump()

    @rule()
    def new_trainer(self) -> None:
        returned, fenced = self.world.run.open_epoch(None, self.world.at)
        assert returned == sum(model.state == "sampled" for model in self.groups.values())
        assert not fenced
        for model in self.groups.values():
            if model.state == "sampled":
                model.state = "finished"

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*self.groups, "missing"]), max_size=3))
        counts = self.world.run.evict_groups(self.world.partition, names, refill=True, at=self.world.at)
        gone = {name for name in names if name in self.groups and self.groups[name].state != "sampled"}
        assert counts.evicted == len(gone)
        for name in gone:
            del self.groups[name]
        self.evicted += len(gone)
        self.credits += len(gone)
        self._pump()

    @precondition(lambda self: self.due_credits)
    @rule(data=st.data())
    def pay(self, data: st.DataObject) -> None:
        claim_id = data.draw(st.sampled_from(sorted(self.due_credits)))
        self.due_credits[claim_id] -= 1
        assert self._add(1, claim_id) == self.due_credits[claim_id]
        if not self.due_credits[claim_id]:
            del self.due_credits[claim_id]

    # ------------------------------------------------------------------------------------------------------- the model

    def _pump(self) -> None:
        pumped = self.world.pump()
        assert not pumped.ended
        assert not pumped.refills

    def _note_pump(self, refills: list[tuple[Wait, RefillClaim]]) -> None:
        """A trainer waited: what was due is gone, each with one credit."""
        due = [name for name, model in self.groups.items() if self._due(model)]
        for name in due:
            assert name not in self.world.partition.groups, f"{name} was due and is still there"
            del self.groups[name]
        self.evicted += len(due)
        self.credits += len(due)
        for _, claim in refills:
            assert self.due_credits.setdefault(claim.claim_id, claim.unpaid) == claim.unpaid

    def _resync(self) -> None:
        """Expiry decides several groups at once; take over what it may decide, after checking that it may."""
        for name, model in self.groups.items():
            group = self.world.partition.groups[name]
            if model.state == "sampled" and group.state is GroupState.FINISHED:
                model.state = "finished"
            if model.state == "open" and group.state is GroupState.FAILED:
                assert max(model.failures.values()) >= MAX_ATTEMPTS
                model.state = "failed"
            model.born = group.born

    def _due(self, model: Model) -> bool:
        if model.state == "failed":
            return True
        return model.state == "finished" and (self._stale(model, self.step) or self._flat(model))

    def _stale(self, model: Model, step: int) -> bool:
        drops = self.strategy is Strategy.DROP and self.max_versions is not None
        return drops and step - model.born + 1 > (self.max_versions or 0)

    @staticmethod
    def _flat(model: Model) -> bool:
        return len(model.rewards) > 1 and len(set(model.rewards.values())) == 1

    def _sampleable(self, step: int) -> list[str]:
        """Oldest first."""
        names = [
            name
            for name, model in self.groups.items()
            if model.state == "finished" and not self._flat(model) and not self._stale(model, step)
        ]
        present = self.world.partition.groups
        return sorted(names, key=lambda name: (self.groups[name].born, present[name].sequence))

    def _holder(self, step: int) -> str | None:
        if self.strategy is not Strategy.WAIT or self.max_versions is None:
            return None
        running = [group for group in self.world.partition.groups.values() if group.state is GroupState.RUNNING]
        holders = [group for group in running if step - group.born + 1 >= self.max_versions]
        return min(holders, key=lambda group: (group.born, group.sequence)).group_id if holders else None

    def _fingerprint(self) -> object:
        partition = self.world.partition
        return (
            partition.ledger(),
            self.world.run.state.events.next_sequence,
            [
                (
                    group.group_id,
                    group.state,
                    group.born,
                    group.results,
                    [(t.state, t.attempt, t.outputs) for t in group.trajectories],
                )
                for group in partition.groups.values()
            ],
        )

    # ------------------------------------------------------------------------------------------------------ invariants

    @invariant()
    def the_ledger_balances(self) -> None:
        ledger = self.world.partition.ledger()
        assert ledger.balanced
        assert ledger.added == self.next_id
        assert ledger.committed == len(self.committed)
        assert ledger.evicted == self.evicted
        assert ledger.present.present == len(self.groups) == self.world.run.state.groups

    @invariant()
    def every_eviction_owes_one_prompt(self) -> None:
        refill = self.world.partition.refill
        assert refill.created == self.credits == self.evicted
        assert refill.unpaid == refill.created - refill.paid - refill.cancelled
        assert refill.unpaid == refill.free + sum(self.due_credits.values())

    @invariant()
    def the_depth_is_what_can_be_sampled(self) -> None:
        for step in (self.step, self.step + 1, self.step + 5):
            depth = self.world.partition.depth(step, self.world.now)
            expected = self._sampleable(step)
            assert depth.sampleable == len(expected)
            oldest = self.world.partition.index.oldest(step, self.world.partition.staleness, 1000)
            assert [group.group_id for group in oldest] == expected
            assert (depth.hold.group_id if depth.hold else None) == self._holder(step)

    @invariant()
    def counts_are_those_of_the_groups(self) -> None:
        counts = self.world.partition.index.counts
        states = [group.state for group in self.world.partition.groups.values()]
        for state in (
            GroupState.PENDING,
            GroupState.RUNNING,
            GroupState.FINISHED,
            GroupState.FAILED,
            GroupState.SAMPLED,
        ):
            assert getattr(counts, state.name.lower()) == states.count(state)

    @invariant()
    def trajectories_add_up(self) -> None:
        open_claims = 0
        for group in self.world.partition.groups.values():
            states = [trajectory.state for trajectory in group.trajectories]
            assert group.finished == states.count(TrajectoryState.FINISHED) <= group.size
            if group.live:
                failures = {index: t.failures for index, t in enumerate(group.trajectories) if t.failures}
                assert failures == +self.groups[group.group_id].failures
                assert group.pending == states.count(TrajectoryState.PENDING)
                assert group.running == states.count(TrajectoryState.RUNNING)
                untouched = group.pending == group.size and not any(t.partial for t in group.trajectories)
                assert (group.state is GroupState.PENDING) == untouched
            else:
                assert TrajectoryState.RUNNING not in states
                assert TrajectoryState.PENDING not in states
            held = {t.claim_id for t in group.trajectories if t.state is TrajectoryState.RUNNING}
            for claim_id in held:
                claim = self.world.run.state.claims.get(claim_id)
                assert claim is not None
                running = {
                    i
                    for i, t in enumerate(group.trajectories)
                    if t.claim_id == claim_id and t.state is TrajectoryState.RUNNING
                }
                assert claim.open == running
            open_claims += len(held)
        assert len(self.world.run.state.claims) == open_claims

    @invariant()
    def the_gate_holds(self) -> None:
        limit = self.world.run.state.config.gate_limit
        counts = self.world.partition.index.counts
        if limit is not None:
            # Finished groups come back from leases, so their sum with the running ones may pass the limit.
            assert counts.running <= limit


class WaitMachine(PartitionMachine):
    """The same under WAIT."""

    strategy = Strategy.WAIT


class GateMachine(PartitionMachine):
    """The same under GATE."""

    strategy = Strategy.GATE


class UnboundedMachine(PartitionMachine):
    """The same without a bound on age."""

    max_versions = None


SETTINGS = settings(max_examples=80, stateful_step_count=50, deadline=None)
for machine in (PartitionMachine, WaitMachine, GateMachine, UnboundedMachine):
    machine.TestCase.settings = SETTINGS

TestDrop = PartitionMachine.TestCase
TestWait = WaitMachine.TestCase
TestGate = GateMachine.TestCase
TestUnbounded = UnboundedMachine.TestCase
