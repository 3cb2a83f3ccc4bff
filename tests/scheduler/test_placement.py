"""Where a policy wants running requests at a lend reaches the trainer and the engine controller."""

import asyncio
from dataclasses import replace
from pathlib import Path

from services.scheduler.convert import decision_from_proto, decision_to_proto
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import Action, Decision, Placement, Point, PolicyConfig, RequestKey
from services.scheduler.policies.verl import VerlPolicy
from tests.scheduler.world import World, world
from turnout.engine.v1 import engine_pb2

WANTED = Placement(hybrid=(RequestKey("a", 0), RequestKey("b", 1)), standalone=(RequestKey("a", 2),))
SENT = engine_pb2.Placement(
    hybrid=[
        engine_pb2.JoinKey(partition="train", group_id="a", trajectory=0),
        engine_pb2.JoinKey(partition="train", group_id="b", trajectory=1),
    ],
    standalone=[engine_pb2.JoinKey(partition="train", group_id="a", trajectory=2)],
)


class Placing(VerlPolicy):
    """verl's answers, with a placement at each lend."""

    def decide(self, point: Point, now: float) -> Decision:
        decision = super().decide(point, now)
        return replace(decision, placement=WANTED) if decision.action is Action.LEND else decision


def create(name: str, config: PolicyConfig) -> Policy:
    return Placing(config)


def begun(w: World) -> list[engine_pb2.BeginLendRequest]:
    """The lends that the controller was asked to begin."""
    return [request for request in w.engine.requests if isinstance(request, engine_pb2.BeginLendRequest)]


async def test_the_engine_hears_where_requests_go_on() -> None:
    """The policy priced moving the short prefixes; by load alone the engine moves the long ones as well."""
    async with world(create=create) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(16)
        await trainer.begin(1)
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(0)
        ended = await trainer.end(1)
        await trainer.complete(ended.lend)
        first, last = begun(w)
        assert not first.HasField("placement")
        assert last.placement == SENT
        assert [key.group_id for key in ended.decision.placement.hybrid] == ["a", "b"]
        (made,) = [
            e.decision_made
            for e in await trainer.events()
            if e.HasField("decision_made") and e.decision_made.action == 2
        ]
        assert (made.placed_on_hybrid, made.placed_on_standalone) == (2, 1)


async def test_a_lend_that_goes_on_after_a_restart_places_as_it_was_decided(tmp_path: Path) -> None:
    """Decided once, a lend must not come out otherwise because the scheduler was restarted in between."""
    async with world(create=create, data_dir=tmp_path, grace_s=0.1) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(16)
        await trainer.begin(1)
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(0)
        w.engine.requests.clear()
        w.engine.script.gates["BeginLend"] = gate = asyncio.Event()
        w.engine.script.arrived["BeginLend"].clear()
        call = asyncio.ensure_future(trainer.end(1))
        await w.engine.script.arrived["BeginLend"].wait()
        await w.restart()
        await asyncio.gather(call, return_exceptions=True)
        gate.set()
        ended = await trainer.end(1)
        assert ended.HasField("lend")
        assert [request.placement for request in begun(w)] == [SENT] * len(begun(w))
        assert len(begun(w)) > 1


def test_a_decision_that_is_kept_keeps_its_placement() -> None:
    """And one without stays without: an empty placement would be a wish for nothing."""
    placed = Decision(action=Action.LEND, reason="r", placement=WANTED)
    assert decision_from_proto(decision_to_proto(placed)) == placed  # type: ignore[arg-type]
    bare = Decision(action=Action.LEND, reason="r")
    assert decision_from_proto(decision_to_proto(bare)) == bare  # type: ignore[arg-type]
