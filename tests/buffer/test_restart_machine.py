"""The service under every sequence of calls, with crashes, snapshots and restores as moves.

A crash is the data directory as it is between two calls, which is what kill -9 leaves; a new service starts on a copy.
The model keeps what was answered in plain dictionaries.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.buffer.helpers import Buffer, Caller, knowledge, output, result, running_buffer
from tests.buffer.test_restarts import keeper_of
from turnout.buffer.v1 import buffer_pb2 as pb

T = TypeVar("T")


@dataclass
class Model:
    """What the buffer has answered: groups of one trajectory by state, in order of arrival."""

    states: dict[str, str] = field(default_factory=dict)
    leases: dict[str, list[str]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    evicted: int = 0
    added: int = 0
    unpaid: int = 0
    # Payloads in a store outside, by the group whose result names them.
    outside: dict[str, str] = field(default_factory=dict)

    @property
    def needed(self) -> set[str]:
        """Payloads outside that results name."""
        return {self.outside[name] for name, state in self.states.items() if state in ("finished", "sampled")}

    def those(self, state: str) -> list[str]:
        return [name for name, there in self.states.items() if there == state]


class RestartMachine(RuleBasedStateMachine):
    """Rules are calls and accidents."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(mkdtemp())
        self.lives = 0
        self.directory = self.root / "life-0"
        self.model = Model()
        self.saved: dict[str, Model] = {}
        self.claims: dict[str, pb.Claim] = {}
        self.numbers = 0
        self.stack = AsyncExitStack()
        self.run(self._start())
        self.run(self.caller.create(size=1, max_attempts=1000))
        self.run(self.caller.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def _start(self) -> None:
        self.buffer: Buffer = await self.stack.enter_async_context(running_buffer(data_dir=self.directory))
        epoch = self.caller.epoch if self.lives else None
        self.caller: Caller = self.buffer.caller()
        self.caller.epoch = epoch

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    # ----------------------------------------------------------------------------------------------------------- calls

    @rule(count=st.integers(1, 3), twice=st.booleans())
    def add(self, count: int, twice: bool) -> None:
        self.numbers += 1
        names = [f"g{self.numbers}.{place}" for place in range(count)]
        for _ in range(1 + twice):
            answer = self.run(self.caller.add(*names, request_id=f"add-{self.numbers}", prompt=b"prompt"))
            assert answer.added == count
        self.model.states |= dict.fromkeys(names, "pending")
        self.model.added += count

    @precondition(lambda self: self.model.those("pending"))
    @rule()
    def claim(self) -> None:
        (claim,) = self.run(self.caller.claim(1))
        assert claim.group_id in self.model.those("pending")
        self.model.states[claim.group_id] = "running"
        self.claims[claim.group_id] = claim

    @precondition(lambda self: self.model.those("running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.model.those("running")))
        token = self.claims[name].token
        self.numbers += 1
        self.model.outside[name] = f"key-{self.numbers}"
        there = output(1.0, 2, 0)
        there.payload.ref.CopyFrom(pb.PayloadRef(id=self.model.outside[name], store="ray", size=1))
        made = result(name, 0, output(1.0, 2, 0, name.encode()), there, token=token)
        for _ in range(2):
            (outcome,) = self.run(self.caller.finish(made))
            assert outcome.code == 0
        self.model.states[name] = "finished"

    @precondition(lambda self: self.model.those("running"))
    @rule(data=st.data(), permanent=st.booleans())
    def fail(self, data: st.DataObject, permanent: bool) -> None:
        name = data.draw(st.sampled_from(self.model.those("running")))
        kind = pb.FAILURE_KIND_PERMANENT if permanent else pb.FAILURE_KIND_RETRYABLE
        (outcome,) = self.run(self.caller.fail(self.claims[name], kind))
        assert outcome.code == 0
        self.model.states[name] = "failed" if permanent else "pending"

    @rule(batch=st.integers(1, 3))
    def sample(self, batch: int) -> None:
        self.numbers += 1
        told = self.run(self.caller.sample(batch, request_id=f"sample-{self.numbers}"))
        gone = self.model.those("failed")
        for name in gone:
            del self.model.states[name]
        self.model.evicted += len(gone)
        self.model.unpaid += len(gone)
        finished = self.model.those("finished")
        assert (told.outcome == "REACHED") == (len(finished) >= batch)
        if told.outcome == "REACHED":
            assert set(told.ids) <= set(finished)
            self.model.leases[told.done.lease_id] = told.ids
            for name in told.ids:
                self.model.states[name] = "sampled"
        for place, refill in enumerate(told.refills):
            name = f"r{self.numbers}.{place}"
            self.run(self.caller.add(name, refill_claim_id=refill.refill_claim_id))
            self.model.states[name] = "pending"
            self.model.added += 1
            self.model.unpaid -= 1

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), back=st.booleans())
    def end_lease(self, data: st.DataObject, back: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        names = self.model.leases.pop(lease_id)
        if back:
            request = pb.ReleaseSampleRequest(run_id=self.caller.run_id, epoch=self.caller.epoch, lease_id=lease_id)
            self.run(self._release(request))
            self.model.states |= dict.fromkeys(names, "finished")
            return
        for _ in range(2):
            assert self.run(self.caller.commit(lease_id)) == names
        for name in names:
            del self.model.states[name]
        self.model.committed += names

    async def _release(self, request: pb.ReleaseSampleRequest) -> None:
        await self.caller.stub.ReleaseSample(request)

    @precondition(lambda self: self.model.states)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.states)))
        answer = self.run(self.caller.evict(name, refill=True))
        if self.model.states[name] == "sampled":
            assert (answer.evicted, answer.sampled) == (0, 1)
            return
        assert answer.evicted == 1
        if self.model.states[name] == "finished" and not self.saved:
            assert self.model.outside[name] in self.released()
        del self.model.states[name]
        self.model.evicted += 1
        self.model.unpaid += 1

    @precondition(lambda self: self.released())
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.released()))
        request = pb.AckReleasesRequest(run_id=self.caller.run_id, store="ray", ids=[name])
        assert self.run(self._acknowledge(request)) == 1
        assert name not in self.released()

    async def _acknowledge(self, request: pb.AckReleasesRequest) -> int:
        return (await self.caller.stub.AckReleases(request)).acknowledged

    def released(self) -> list[str]:
        """What the owner of the store outside is told."""
        book = self.buffer.desk.memory.externals.of(self.caller.run_id)
        return [payload.id for payload in book.released()]

    # ------------------------------------------------------------------------------------------------------- accidents

    @rule()
    def crash(self) -> None:
        self.run(self._crash())

    async def _crash(self) -> None:
        known = knowledge(self.buffer.desk.memory)
        self.lives += 1
        before, self.directory = self.directory, self.root / f"life-{self.lives}"
        shutil.copytree(before, self.directory, ignore=shutil.ignore_patterns("*ballast*"))
        await self.stack.aclose()
        await self._start()
        assert knowledge(self.buffer.desk.memory) == known

    @rule()
    def compact(self) -> None:
        self.run(keeper_of(self.buffer).snapshot())

    @rule()
    def save(self) -> None:
        self.numbers += 1
        name = f"save-{self.numbers}"
        self.run(self.caller.checkpoint(name))
        self.saved[name] = deepcopy(self.model)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.run(self.caller.restore(name))
        self.model = deepcopy(self.saved[name])
        back = {"running": "pending", "sampled": "finished"}
        self.model.states = {name: back.get(state, state) for name, state in self.model.states.items()}
        self.model.leases.clear()

    @rule()
    def new_trainer(self) -> None:
        self.run(self.caller.open())
        for names in self.model.leases.values():
            self.model.states |= dict.fromkeys(names, "finished")
        self.model.leases.clear()

    # ------------------------------------------------------------------------------------------------------ invariants

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def delete_save(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        del self.saved[name]
        request = pb.DeleteCheckpointRequest(run_id=self.caller.run_id, checkpoint_id=name)
        self.run(self._delete(request))

    async def _delete(self, request: pb.DeleteCheckpointRequest) -> None:
        await self.caller.stub.DeleteCheckpoint(request)

    @invariant()
    def what_is_needed_is_never_let_go(self) -> None:
        needed = self.model.needed.union(*(saved.needed for saved in self.saved.values()))
        assert not needed.intersection(self.released())

    @invariant()
    def the_ledger_is_that_of_the_model(self) -> None:
        ledger = self.run(self.caller.ledger())
        model = self.model
        assert (ledger.added, ledger.committed, ledger.evicted) == (model.added, len(model.committed), model.evicted)
        assert ledger.present == pb.GroupCounts(
            **{state: len(model.those(state)) for state in ("pending", "running", "finished", "failed", "sampled")}
        )
        assert ledger.credits_created - ledger.credits_paid == model.unpaid
        assert len(set(model.committed)) == len(model.committed)


RestartMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRestarts = RestartMachine.TestCase
