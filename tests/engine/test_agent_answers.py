"""What a node agent tells with its answers."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.backends.agent import AgentBackend
from services.engine.domain.engine_state import EngineState
from tests.engine.helpers import RUN, register, running
from turnout.engine.v1 import engine_pb2 as pb


async def test_a_command_through_an_agent_needs_no_second_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe after every call of a plan doubles the calls to an agent, and with them what the controller adds."""
    asked = 0
    probe = AgentBackend.probe

    async def counted(self: AgentBackend) -> EngineState:
        nonlocal asked
        asked += 1
        return await probe(self)

    monkeypatch.setattr(AgentBackend, "probe", counted)
    async with running(agent=True, replica=["h0:hybrid"]) as agent, running(probe_interval=3600) as engine:
        await register(engine, "h0", backend="agent", endpoint=agent.host.target)
        replica = engine.controller.fleet.get("h0").replica
        at_registration, asked = asked, 0
        assert at_registration == 1

        await engine.stub.Sleep(pb.SleepRequest(run_id=RUN, level=pb.SLEEP_LEVEL_ONE))
        assert replica.fully_asleep
        assert replica.state.sleep_level == 1
        await engine.stub.WakeUp(pb.WakeUpRequest(run_id=RUN))
        assert not replica.asleep_tags
        assert replica.state.incarnation == agent.controller.incarnation
        assert asked == 0


async def test_a_call_that_a_sick_engine_carried_out_has_not_failed() -> None:
    """The answer that heals an engine tells that it was sick until then; to call that a failure would be wrong."""
    faults: dict[str, Any] = {"fault_injection": True, "probe_interval": 3600}
    async with running(agent=True, replica=["h0:hybrid"], **faults) as agent, running(**faults) as engine:
        await register(engine, "h0", backend="agent", endpoint=agent.host.target)
        agent.controller.fleet.get("h0").replica.mark_unresponsive()
        healed = await engine.stub.CollectiveRpc(pb.CollectiveRpcRequest(run_id=RUN, method="fault_heal"))
    assert healed.operation.state == pb.OPERATION_STATE_SUCCEEDED


async def test_only_an_agent_tells_states_with_its_answer() -> None:
    """For a controller of many replicas that would be a listing of its fleet with every command."""
    async with running(agent=True, replica=["h0:hybrid"]) as agent, running() as engine:
        await register(engine, "h0", backend="agent", endpoint=agent.host.target)
        through = await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        itself = await agent.stub.Resume(pb.ResumeRequest(run_id=RUN))
    assert not through.operation.replicas
    (told,) = itself.operation.replicas
    assert (told.spec.replica_id, told.paused) == ("h0", False)
    assert itself.operation.incarnation == agent.controller.incarnation
