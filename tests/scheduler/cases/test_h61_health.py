"""H61: the scheduler's health, with everything up and with a peer down."""

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.errors import Code
from tests.scheduler.world import error_of, world

HealthStub: Any = health_pb2_grpc.HealthStub
ReflectionStub: Any = reflection_pb2_grpc.ServerReflectionStub
NAME = "turnout.scheduler.v1.SwitchScheduler"
SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_h61_health_and_reflection_know_the_scheduler() -> None:
    """An orchestrator asks by name; an operator lists what there is."""
    async with world() as w, grpc.aio.insecure_channel(w.host.target) as channel:
        health = HealthStub(channel)
        for name in ("", NAME):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        error = await error_of(health.Check(health_pb2.HealthCheckRequest(service="no.such.Service")))
        assert error.code is Code.NOT_FOUND
        reflection = ReflectionStub(channel)
        request: Any = reflection_pb2.ServerReflectionRequest
        listed = [
            service.name
            async for answer in reflection.ServerReflectionInfo(iter([request(list_services="")]))
            for service in answer.list_services_response.service
        ]
        assert NAME in listed
        assert "grpc.health.v1.Health" in listed


async def test_h61_a_peer_that_is_down_fails_its_runs_calls_and_not_the_scheduler() -> None:
    """One run's dead buffer must not take the scheduler of all runs out of service."""
    async with world(peer_timeout_s=1.0) as w, grpc.aio.insecure_channel(w.host.target) as channel:
        trainer = await w.trainer()
        await w.buffer_host.stop(0)
        error = await error_of(trainer.begin(1))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "BUFFER_UNREACHABLE")
        assert error.metadata["target"] == w.buffer_host.target
        health = HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service=NAME))).status == SERVING
        assert (await trainer.run()).expected_calls[0] == "BeginStep(step=1)"
