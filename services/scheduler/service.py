"""The switch scheduler as a hosted service.

Invariant: it ends its own work before it closes the connections to the peers that the work needs.
"""

from __future__ import annotations

import uuid

import grpc.aio

from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import Build, HostContext, HostedService, ServiceHost, StartError
from services.runtime.journal import JournalOptions
from services.runtime.journal.metrics import JournalMetrics
from services.scheduler import policies
from services.scheduler.discovery import Peers
from services.scheduler.domain.config import PolicyFactory
from services.scheduler.domain.holdings import Holdings
from services.scheduler.hosted import Tools
from services.scheduler.links import Links
from services.scheduler.metrics import RunStates, SchedulerMetrics
from services.scheduler.registry import Registry
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from services.scheduler.storage.keeper import Keeper
from turnout.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

NAME = "scheduler"
FULL_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SwitchScheduler"].full_name


class SchedulerService(HostedService):
    """The switch scheduler of one process."""

    full_names = (FULL_NAME,)

    def __init__(self, settings: SchedulerSettings, context: HostContext, create: PolicyFactory) -> None:
        tools = Tools(context.clock, context.draining, settings, Holdings(), lambda: uuid.uuid4().hex)
        self._links = Links(settings.dialer())
        self.registry = Registry(tools, self._links, create, SchedulerMetrics(context.metrics))
        self.keeper: Keeper | None = None
        self._context = context
        if settings.data_dir is not None:
            options = JournalOptions(durability=settings.level)
            self.keeper = Keeper(tools, self.registry, create, settings.data_dir, options, context.set_serving)
            tools.keeping = self.keeper
        self._servicer = SchedulerServicer(self.registry, tools, uuid.uuid4().hex)

    def register(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SwitchSchedulerServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load what is stored, and go on with it. Raises StartError."""
        context = self._context
        context.metrics.register(RunStates(lambda: [hosted.run for hosted in self.registry.present], context.clock))
        peers = Peers(self._links)
        context.discovery.add(lambda: peers.targets(self.registry.present))
        if self.keeper is not None:
            try:
                await self.keeper.open()
            except (TurnoutError, OSError) as error:
                raise StartError(str(error)) from error
            if self.keeper.journal is not None:
                context.metrics.register(JournalMetrics(lambda: self.keeper.journal if self.keeper else None))
                context.tasks.supervise("scheduler journal", self.keeper.watch)
                context.tasks.supervise("scheduler compaction", self.keeper.compact)
        self.registry.go_on()

    async def drain(self) -> None:
        # What is kept, the next process goes on with: calls under way have the grace, and then they are cut.
        if self.keeper is None or self.keeper.journal is None:
            await self.registry.drain()

    async def close(self) -> None:
        await self.registry.close()
        if self.keeper is not None:
            await self.keeper.close()
        await self._links.close()


def builder(settings: SchedulerSettings, create: PolicyFactory = policies.create) -> Build:
    """What a host needs to make this service; `create` makes policies by name."""
    return lambda context: SchedulerService(settings, context, create)


def build(
    settings: SchedulerSettings, clock: Clock | None = None, create: PolicyFactory = policies.create
) -> ServiceHost:
    """A host for the switch scheduler; `clock` is the real one, scaled by the settings, unless given."""
    return ServiceHost(NAME, settings, builder(settings, create), clock=clock)
