"""The engine controller as a service: how it is put together and run."""

import grpc.aio

from services.engine.controller import Controller
from services.engine.discovery import replicas_of
from services.engine.fleet import OpenBackend
from services.engine.metrics import EngineMetrics
from services.engine.servicer import EngineControllerServicer
from services.engine.settings import EngineSettings
from services.engine.storage.keeper import Keeper
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import Build, HostContext, HostedService, ServiceHost, StartError
from services.runtime.journal import JournalOptions
from services.runtime.journal.metrics import JournalMetrics
from turnout.engine.v1 import engine_pb2_grpc

NAME = "engine"


class EngineService(HostedService):
    """The hosted engine controller."""

    full_names = ("turnout.engine.v1.EngineController",)

    def __init__(self, context: HostContext, settings: EngineSettings, open_backend: OpenBackend | None) -> None:
        try:
            self.controller = Controller(settings, context, open_backend)
        except OSError as error:
            raise StartError(f"a file of peer_ca, peer_cert or peer_key cannot be used: {error}") from error
        self._context = context
        self.keeper: Keeper | None = None
        if settings.data_dir is not None:
            options = JournalOptions(durability=settings.level)
            self.keeper = Keeper(self.controller.book, settings.data_dir, options, self.controller.suspend)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        engine_pb2_grpc.add_EngineControllerServicer_to_server(EngineControllerServicer(self.controller), server)

    async def start(self) -> None:
        """Go on with what is stored, and register the replicas of an agent. Raises StartError."""
        self._context.metrics.register(EngineMetrics(self.controller))
        self._context.discovery.add(lambda: replicas_of(self.controller.fleet))
        past = None
        try:
            if self.keeper is not None:
                past = await self.keeper.open()
            await self.controller.start(past)
        except (TurnoutError, OSError) as error:
            raise StartError(str(error)) from error
        if self.keeper is not None and self.keeper.keeps:
            self._context.metrics.register(JournalMetrics(lambda: self.keeper.journal if self.keeper else None))
            self._context.tasks.supervise("engine journal", self.keeper.watch)
            self._context.tasks.supervise("engine compaction", self.keeper.compact)

    async def drain(self) -> None:
        """End the requests."""
        await self.controller.drain()

    async def close(self) -> None:
        """Let go of the engines, and flush what is stored."""
        await self.controller.close()
        if self.keeper is not None:
            await self.keeper.close()


def builder(settings: EngineSettings, open_backend: OpenBackend | None = None) -> Build:
    """What a host needs to make this service; `open_backend` replaces the backends that it has."""
    return lambda context: EngineService(context, settings, open_backend)


def build(settings: EngineSettings, clock: Clock | None = None, open_backend: OpenBackend | None = None) -> ServiceHost:
    """A host for the engine controller; `clock` is the real one, scaled by the settings, unless given."""
    return ServiceHost(NAME, settings, builder(settings, open_backend), clock=clock)
