"""The replay buffer as a service: how it is put together and run."""

import grpc.aio

from services.buffer.desk import Desk
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.metrics import BufferMetrics
from services.buffer.servicer import ReplayBufferServicer
from services.buffer.settings import BufferSettings
from services.runtime.clock import Clock
from services.runtime.host import Build, HostContext, HostedService, ServiceHost
from turnout.buffer.v1 import buffer_pb2_grpc

NAME = "buffer"


class BufferService(HostedService):
    """The hosted replay buffer."""

    full_names = ("turnout.buffer.v1.ReplayBuffer",)

    def __init__(self, context: HostContext, settings: BufferSettings) -> None:
        store = MemoryPayloadStore()
        self.desk = Desk(context.clock, store)
        self._context = context
        self.servicer = ReplayBufferServicer(self.desk, context.draining, store, settings.max_message_bytes)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        buffer_pb2_grpc.add_ReplayBufferServicer_to_server(self.servicer, server)

    async def start(self) -> None:
        """Begin to end what ends by itself."""
        self._context.tasks.supervise("buffer expiry", self.desk.expire)
        self._context.metrics.register(BufferMetrics(self.desk))


def builder(settings: BufferSettings) -> Build:
    """What a host needs to make this service."""
    return lambda context: BufferService(context, settings)


def build(settings: BufferSettings, clock: Clock | None = None) -> ServiceHost:
    """A host for the replay buffer; `clock` is the real one, scaled by the settings, unless given."""
    return ServiceHost(NAME, settings, builder(settings), clock=clock)
