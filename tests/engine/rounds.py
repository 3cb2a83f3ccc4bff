"""A trainer's round: register, update, lend, reclaim, in steps that are repeated until they are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.engine.helpers import RUN, Engine, move_weights, register, replicas, role, vacate
from turnout.engine.v1 import engine_pb2 as pb

HYBRID = ("h0", "h1")
STANDALONE = ("s0", "s1")
REGISTERED = 5
"""Steps until the run has its replicas and its epoch."""


class Trainer:
    """What a trainer does in a round, as steps that it repeats until they are answered."""

    def __init__(self, engine: Engine, place: Callable[[str], dict[str, Any]] = lambda replica_id: {}) -> None:
        """`place` gives the fields of a replica's spec that say where its engine is."""
        self.engine = engine
        self.steps: list[Callable[[], Awaitable[object]]] = [
            *(lambda r=r: register(self.engine, r, "hybrid", **place(r)) for r in HYBRID),
            *(lambda r=r: register(self.engine, r, "standalone", **place(r)) for r in STANDALONE),
            self.open_epoch,
            self.begin_standalone,
            lambda: self.feed(0),
            lambda: self.commit(0),
            lambda: self.feed(1),
            lambda: self.commit(1),
            self.begin_lend,
            self.begin_hybrid,
            lambda: self.feed(0),
            lambda: self.commit(0),
            self.vacated,
            self.finish_lend,
            self.reclaim,
        ]
        self.begun: pb.BeginWeightUpdateResponse = pb.BeginWeightUpdateResponse()
        self.wave: list[str] = []
        self.known: list[str] = []
        self.at = 0
        self.epoch = 1

    async def go(self) -> None:
        """Take the steps that are left."""
        while self.at < len(self.steps):
            await self.steps[self.at]()
            self.at += 1

    async def open_epoch(self) -> None:
        answer = await self.engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=1, request_id="epoch"))
        assert answer.epoch == 1

    async def _begin(self, selector: pb.ReplicaSelector, kind: str, request_id: str, staggered: bool) -> None:
        self.begun = await self.engine.stub.BeginWeightUpdate(
            pb.BeginWeightUpdateRequest(
                run_id=RUN,
                epoch=self.epoch,
                selector=selector,
                weight_version=1,
                kind=pb.UpdateKind.Value(f"UPDATE_KIND_{kind}"),
                request_id=request_id,
                staggered=staggered,
            )
        )
        self.wave = [layout.replica_id for layout in self.begun.wave]

    async def begin_standalone(self) -> None:
        await self._begin(role("standalone"), "AWAKE", "standalone", True)

    async def begin_hybrid(self) -> None:
        await self._begin(role("hybrid"), "ASLEEP", "hybrid", False)

    async def feed(self, wave_index: int) -> None:
        moved = await move_weights(self.engine, self.begun.update_id, wave_index=wave_index, epoch=self.epoch)
        assert not [outcome for outcome in moved.operation.outcomes if outcome.code]

    async def commit(self, wave_index: int) -> None:
        request = pb.CommitWeightUpdateRequest(
            run_id=RUN,
            epoch=self.epoch,
            update_id=self.begun.update_id,
            acks=[pb.UpdateAck(replica_id=replica_id, ok=True) for replica_id in self.wave],
            wave_index=wave_index,
        )
        answer = await self.engine.stub.CommitWeightUpdate(request)
        self.wave = [layout.replica_id for layout in answer.wave]
        assert answer.complete == (not self.wave)

    async def begin_lend(self) -> None:
        answer = await self.engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=self.epoch, lend_id="lend"))
        assert tuple(answer.replica_ids) == HYBRID

    async def vacated(self) -> None:
        assert not (await vacate(self.engine, self.begun, epoch=self.epoch)).missing

    async def finish_lend(self) -> None:
        request = pb.FinishLendRequest(run_id=RUN, epoch=self.epoch, lend_id="lend", weight_version=1)
        await self.engine.stub.FinishLend(request)
        now = await replicas(self.engine)
        assert {replica.route for replica in now.values()} == {pb.ROUTE_STATE_SERVING}

    async def reclaim(self) -> None:
        await self.engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=self.epoch))


class Doubter(Trainer):
    """A trainer that gives up an update and a lend on its way."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.steps[REGISTERED:] = [
            self.begin_standalone,
            lambda: self.feed(0),
            self.abort_update,
            self.begin_again,
            lambda: self.feed(0),
            lambda: self.commit(0),
            lambda: self.feed(1),
            lambda: self.commit(1),
            self.begin_lend,
            self.begin_hybrid,
            lambda: self.feed(0),
            self.next_epoch,
            self.abort_lend,
            self.reclaim,
        ]

    async def abort_update(self) -> None:
        request = pb.AbortWeightUpdateRequest(run_id=RUN, epoch=self.epoch, update_id=self.begun.update_id)
        await self.engine.stub.AbortWeightUpdate(request)
        now = await replicas(self.engine)
        assert now["s0"].weights == pb.WEIGHTS_STATE_HALF_UPDATED
        assert now["s0"].route != pb.ROUTE_STATE_SERVING

    async def begin_again(self) -> None:
        await self._begin(role("standalone"), "AWAKE", "again", True)

    async def next_epoch(self) -> None:
        """Another trainer takes over: what this one has open is given up before it is told so."""
        request = pb.OpenEpochRequest(run_id=RUN, epoch=2, request_id="next")
        assert (await self.engine.stub.OpenEpoch(request)).epoch == 2
        self.epoch = 2
        assert not any(replica.update_id or replica.lend_id for replica in (await replicas(self.engine)).values())

    async def abort_lend(self) -> None:
        await self.engine.stub.AbortLend(pb.AbortLendRequest(run_id=RUN, epoch=self.epoch, lend_id="lend"))
        now = await replicas(self.engine)
        assert all(now[hybrid].confirmed_free for hybrid in HYBRID)
