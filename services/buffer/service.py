"""The replay buffer as a service: how it is put together and run."""

from dataclasses import replace

import grpc.aio

from services.buffer.desk import Desk
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.metrics import BufferMetrics
from services.buffer.segments import SegmentOptions
from services.buffer.servicer import ReplayBufferServicer
from services.buffer.settings import BufferSettings
from services.buffer.storage.keeper import Keeper
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import Build, HostContext, HostedService, ServiceHost, StartError
from services.runtime.journal import Durability, JournalOptions
from services.runtime.journal.metrics import JournalMetrics
from turnout.buffer.v1 import buffer_pb2_grpc

NAME = "buffer"


class BufferService(HostedService):
    """The hosted replay buffer."""

    full_names = ("turnout.buffer.v1.ReplayBuffer",)

    def __init__(self, context: HostContext, settings: BufferSettings) -> None:
        self.desk = Desk(context.clock, MemoryPayloadStore())
        self._context = context
        self.keeper: Keeper | None = None
        if settings.data_dir is not None:
            segments = SegmentOptions(memory_bytes=settings.payload_memory)
            if settings.level is not Durability.NONE:
                segments = replace(segments, durability=settings.level)
            self.keeper = Keeper(
                self.desk,
                settings.data_dir,
                JournalOptions(durability=settings.level),
                segments,
                context.set_serving,
            )
        checkpoints = None if self.keeper is None else self.keeper.checkpoints
        self.servicer = ReplayBufferServicer(self.desk, context.draining, settings.max_message_bytes, checkpoints)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        buffer_pb2_grpc.add_ReplayBufferServicer_to_server(self.servicer, server)

    async def start(self) -> None:
        """Load what is stored, and begin to end what ends by itself. Raises StartError."""
        if self.keeper is not None:
            try:
                await self.keeper.open()
            except (TurnoutError, OSError) as error:
                raise StartError(str(error)) from error
            if self.desk.journal is not None:
                self._context.metrics.register(JournalMetrics(lambda: self.desk.journal))
                self._context.tasks.supervise("buffer journal", self.keeper.watch)
                self._context.tasks.supervise("buffer compaction", self.keeper.compact)
                self._context.tasks.supervise("buffer reserve", self.keeper.reserve)
        self._context.tasks.supervise("buffer expiry", self.desk.expire)
        self._context.metrics.register(BufferMetrics(self.desk))

    async def close(self) -> None:
        """Flush what is stored."""
        if self.keeper is not None:
            await self.keeper.close()


def builder(settings: BufferSettings) -> Build:
    """What a host needs to make this service."""
    return lambda context: BufferService(context, settings)


def build(settings: BufferSettings, clock: Clock | None = None) -> ServiceHost:
    """A host for the replay buffer; `clock` is the real one, scaled by the settings, unless given."""
    return ServiceHost(NAME, settings, builder(settings), clock=clock)
