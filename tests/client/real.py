"""The real services in this process, over real sockets, at a speed for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.buffer import service as buffer_service
from services.buffer.settings import BufferSettings
from services.engine import service as engine_service
from services.engine.settings import EngineSettings
from services.runtime.host import ServiceHost
from services.runtime.permissions import Role
from services.scheduler import service as scheduler_service
from services.scheduler.settings import SchedulerSettings
from turnout.client import AsyncEngineClient, ClientOptions, Security
from turnout.engine.v1 import engine_pb2

TIME_SCALE = 0.01
"""Wall seconds per domain second."""

LISTEN = ["127.0.0.1:0"]


@contextlib.asynccontextmanager
async def real_buffer(listen: str = LISTEN[0]) -> AsyncIterator[ServiceHost]:
    """A replay buffer."""
    async with buffer_service.build(BufferSettings(listen=[listen], grace_s=1.0)) as host:
        yield host


@dataclass
class House:
    """All three services and an agent with two standalone and two hybrid reference replicas."""

    buffer: ServiceHost
    engine: ServiceHost
    scheduler: ServiceHost
    agent: ServiceHost
    options: Callable[[Role], ClientOptions]
    """How a client of a role reaches them."""

    async def register(self, run_id: str, epoch: int | None = None) -> None:
        """Register the replicas at the controller; the hybrids hold no weights."""
        async with AsyncEngineClient(self.engine.target, self.options(Role.TRAINER)) as client:
            for replica_id, role in REPLICAS.items():
                await client.calls.Register(
                    engine_pb2.RegisterRequest(
                        run_id=run_id,
                        epoch=epoch,
                        spec=engine_pb2.ReplicaSpec(
                            replica_id=replica_id,
                            role=role,
                            gpus=[engine_pb2.Gpu(node="n0", uuid=f"GPU-{replica_id}")],
                            backend="agent",
                            endpoint=self.agent.target,
                            weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
                        ),
                    )
                )


REPLICAS = {
    "s0": engine_pb2.REPLICA_ROLE_STANDALONE,
    "s1": engine_pb2.REPLICA_ROLE_STANDALONE,
    "h0": engine_pb2.REPLICA_ROLE_HYBRID,
    "h1": engine_pb2.REPLICA_ROLE_HYBRID,
}


def _open(role: Role) -> ClientOptions:
    return ClientOptions(security=Security())


@dataclass(frozen=True)
class Locks:
    """How the services of a house protect themselves, and how those are let in who may come."""

    served: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every service."""
    calling: Mapping[str, Any] = field(default_factory=dict)
    """Settings of those that call others."""
    options: Callable[[Role], ClientOptions] = _open


@contextlib.asynccontextmanager
async def house(locks: Locks | None = None) -> AsyncIterator[House]:
    """All services for the length of a block."""
    locks = locks or Locks()
    served: dict[str, Any] = {"listen": LISTEN, "time_scale": TIME_SCALE, **locks.served}
    calling = {**served, **locks.calling}
    agent_settings = EngineSettings(
        agent=True,
        replica=["s0:standalone", "s1:standalone", "h0:hybrid", "h1:hybrid"],
        replica_weights=False,
        length_mean=200,
        weights_bytes=1 << 20,
        kv_bytes=1 << 20,
        **served,
    )
    async with contextlib.AsyncExitStack() as stack:
        agent = await stack.enter_async_context(engine_service.build(agent_settings))
        engine = await stack.enter_async_context(engine_service.build(EngineSettings(**calling)))
        buffer = await stack.enter_async_context(buffer_service.build(BufferSettings(**served)))
        scheduler = await stack.enter_async_context(scheduler_service.build(SchedulerSettings(**calling)))
        yield House(buffer, engine, scheduler, agent, locks.options)
