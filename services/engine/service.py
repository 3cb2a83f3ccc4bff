"""The engine controller as a service: how it is put together and run."""

import grpc.aio

from services.engine.controller import Controller
from services.engine.fleet import OpenBackend
from services.engine.metrics import EngineMetrics
from services.engine.servicer import EngineControllerServicer
from services.engine.settings import EngineSettings
from services.runtime.clock import Clock
from services.runtime.host import Build, HostContext, HostedService, ServiceHost
from turnout.engine.v1 import engine_pb2_grpc

NAME = "engine"


class EngineService(HostedService):
    """The hosted engine controller."""

    full_names = ("turnout.engine.v1.EngineController",)

    def __init__(self, context: HostContext, settings: EngineSettings, open_backend: OpenBackend | None) -> None:
        self.controller = Controller(settings, context, open_backend)
        self._context = context

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        engine_pb2_grpc.add_EngineControllerServicer_to_server(EngineControllerServicer(self.controller), server)

    async def start(self) -> None:
        """Register the replicas of an agent."""
        self._context.metrics.register(EngineMetrics(self.controller))
        await self.controller.start()

    async def drain(self) -> None:
        """End the requests."""
        await self.controller.drain()

    async def close(self) -> None:
        """Let go of the engines."""
        await self.controller.close()


def builder(settings: EngineSettings, open_backend: OpenBackend | None = None) -> Build:
    """What a host needs to make this service; `open_backend` replaces the backends that it has."""
    return lambda context: EngineService(context, settings, open_backend)


def build(settings: EngineSettings, clock: Clock | None = None, open_backend: OpenBackend | None = None) -> ServiceHost:
    """A host for the engine controller; `clock` is the real one, scaled by the settings, unless given."""
    return ServiceHost(NAME, settings, builder(settings, open_backend), clock=clock)
