"""The engine controller: its parts, put together.

Invariants: whatever acts on the run first passes the fence; after a restart no engine is believed, every one is probed.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from services.engine.backends.registry import Backends
from services.engine.book import Book
from services.engine.cluster.actors import Cluster
from services.engine.commands import Commands
from services.engine.domain.fence import Fence
from services.engine.domain.lends import Lends
from services.engine.domain.operations import OperationLog
from services.engine.domain.partials import Partials
from services.engine.domain.spec import ReplicaSpec, Role
from services.engine.domain.weights import Updates
from services.engine.fanout import FanOut
from services.engine.fleet import Fleet, OpenBackend
from services.engine.generation import Generations
from services.engine.health import Prober
from services.engine.lending import Lending
from services.engine.progress import ProgressReader
from services.engine.reference.faults import FAULTS
from services.engine.settings import EngineSettings
from services.engine.sinks.base import RouteSink
from services.engine.sinks.http_hook import HttpHook
from services.engine.sinks.publisher import Publisher
from services.engine.sinks.verl_balancer import VerlBalancer
from services.engine.slot import Slot
from services.engine.storage.past import Past
from services.engine.updating import Updating
from services.runtime.errors import TurnoutError
from services.runtime.host import HostContext
from services.runtime.idempotency import Answers
from services.runtime.logs import get_logger

FIRST_PROBES_S: Final = 2.0
"""How long a restart waits for the engines: a healthy one answers in milliseconds, and the others do not get better."""

ABORT_TIMEOUT_S = 5.0
"""Wall seconds that an engine has to end a request; then the controller lets go of it."""

_LOG = get_logger("engine")


class Controller:
    """Everything the servicer needs."""

    def __init__(self, settings: EngineSettings, context: HostContext, open_backend: OpenBackend | None = None) -> None:
        self.settings = settings
        self.context = context
        self.clock = context.clock
        self.draining = context.draining
        self.incarnation = secrets.token_hex(8)
        self.answers = Answers()
        self.partials = Partials()
        self.fence = Fence(settings.run, binds_at_any_call=settings.agent)
        cluster = Cluster(settings.ray_address)
        if open_backend is None:
            open_backend = Backends(settings, context.clock, lambda: self.fence.run_id, cluster).open
        # Ids of operations and updates name the incarnation, so that those of an earlier one are never mistaken.
        prefix = self.incarnation[:8]
        self.operations = OperationLog(prefix)
        self._lends, self._updates = Lends(), Updates()
        self.book = Book(self.fence, self.operations, self._lends, self._updates, self.answers)
        self.fleet = Fleet(context.clock, open_backend, settings.probe_timeout, self.book)
        fan_out = FanOut(self.operations, context.tasks, context.clock, self.book)
        faults = FAULTS if settings.fault_injection else frozenset()
        self.commands = Commands(fan_out, frozenset(settings.allow_method) | faults)
        self.updating = Updating(self.fleet, fan_out, self._updates, context.clock, prefix, self.book)
        sinks: list[RouteSink] = [
            HttpHook(url, settings.route_hook_holds, settings.peer_context()) for url in settings.route_hook
        ]
        if settings.verl_balancer:
            sinks.append(VerlBalancer(settings.verl_balancer, cluster))
        self.publisher = Publisher(self.fleet, sinks, context.tasks, lambda: (self.fence.run_id, self.incarnation))
        self.lending = Lending(self.fleet, fan_out, self.updating, self._lends, self.book, self.publisher.settled)
        self.generations = Generations(self.fleet, context.clock, context.draining, prefix, ABORT_TIMEOUT_S)
        self.progress = ProgressReader(self.fleet, self.generations, context.clock)
        # What an agent's engine has to do, the controller of the run says.
        free = None if settings.agent else self._free_stray
        self._prober = Prober(self.fleet, context, settings.probe_interval, free)

    async def start(self, past: Past | None = None) -> None:
        """Go on with what an earlier controller knew; register the replicas of an agent.

        Returns when the engines were probed, or have taken too long. Raises FAILED_PRECONDITION / RUN_BOUND if the past
        is that of another run.
        """
        if past is not None:
            await self._restore(past)
        for own in self.settings.own_replicas:
            spec = ReplicaSpec(
                own.replica_id, own.role, self.settings.own_backend, weights_loaded=self.settings.replica_weights
            )
            self._prober.watch(await self.fleet.register(spec))
        # Not before the engines were probed: until then every route is OUT.
        self.publisher.start()

    async def _restore(self, past: Past) -> None:
        self.fence.restore(past.run_id, past.epoch)
        self._lends.restore(past.lends.values())
        interrupted = [operation for operation in past.operations.values() if operation.duration is None]
        for operation in interrupted:
            operation.interrupt(self.clock.wall())
        self.operations.restore(past.operations.values())
        for operation in self.operations.all:
            self.partials.keep(operation)
        for (_, request_id), answer in past.answers.items():
            call, content, at, value = answer.call, answer.fingerprint, answer.at, answer.value
            self.answers.remember(call, call, request_id, content, at, value)
        slots = [self.fleet.restore(kept) for kept in past.replicas.values()]
        self.updating.restore(past.updates.values())
        for operation in interrupted:
            self.book.operation(operation)
        reopened = [self.context.tasks.spawn(f"reopen {slot.replica_id}", self._reopen(slot)) for slot in slots]
        if reopened:
            await asyncio.wait(reopened, timeout=FIRST_PROBES_S)
            self._prober.report()
            _LOG.info("restored", replicas=len(slots), operations_cut=len(interrupted), epoch=past.epoch)
        self.context.tasks.spawn("abandon updates", self.updating.abandon_orphans(self.timeout(None)))

    async def _reopen(self, slot: Slot) -> None:
        while self.fleet.holds(slot):
            try:
                await self.fleet.reopen(slot)
            except TurnoutError as error:
                _LOG.warning("engine not opened again yet", replica_id=slot.replica_id, reason=error.message)
                await asyncio.sleep(self.settings.probe_interval)
            else:
                break
        self._prober.watch(slot)

    def suspend(self, suspended: bool) -> None:
        """Nothing can be stored, so nothing is answered (True); or it can be again."""
        self._prober.suspended = suspended
        self._prober.report()

    async def open_epoch(self, run_id: str, epoch: int | None) -> int:
        """Fence the trainer before: its commands are refused, its weight updates and its lend are aborted."""
        opened = self.fence.open_epoch(run_id, epoch)
        # Shielded: a trainer that goes away again leaves no half of it.
        await asyncio.shield(self.context.tasks.spawn("give up for a newer trainer", self._give_up()))
        # In one turn with the answer: an epoch that was not granted before a crash can be asked for again.
        self.book.fence()
        return opened

    async def _give_up(self) -> None:
        await self.updating.give_up(self.timeout(None))
        await self.lending.give_up(self.timeout(None))

    async def register(self, run_id: str, spec: ReplicaSpec) -> Slot:
        """Add a replica and watch it; the first one binds the run, one that comes during a lend takes part in it."""
        self.fence.check_binding(run_id)
        spec.validate()
        spec.require_gpus()
        known = {slot.replica_id for slot in self.fleet.all}
        bound_before = self.fence.run_id
        # The agent of the replica is told the run when it is probed.
        self.fence.bind(run_id)
        try:
            slot = await self.fleet.register(spec)
        except TurnoutError:
            if not self.fleet.all and not self.fence.epoch:
                self.fence.run_id = bound_before
            raise
        self.book.fence()
        if slot.replica_id not in known:
            self._prober.watch(slot)
            if spec.role is Role.HYBRID:
                await self.lending.join(slot, self.timeout(None))
        return slot

    async def _free_stray(self, slot: Slot) -> None:
        await self.lending.free_stray(slot, self.timeout(None))

    async def deregister(self, replica_id: str) -> None:
        """Take a replica out, keeping what its requests have so far."""
        slot = self.fleet.deregister(replica_id)
        self.lending.forget(replica_id)
        self.updating.forget(replica_id)
        self._prober.report()
        self.context.tasks.spawn(f"close {replica_id}", self._let_go(slot))

    async def _let_go(self, slot: Slot) -> None:
        """Have the engine end its requests, which keeps their tokens, then send on those that it does not end."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await slot.backend.abort([forward.engine_id for forward in slot.forwards])
                await slot.forwards.emptied(ABORT_TIMEOUT_S)
        except (TurnoutError, TimeoutError) as error:
            _LOG.warning("requests of a removed replica lose tokens", replica_id=slot.replica_id, error=str(error))
        slot.forwards.interrupt()
        await slot.forwards.emptied(ABORT_TIMEOUT_S)
        await slot.close()

    async def drain(self) -> None:
        """End the requests; whoever has them repeats them."""
        self.generations.stop()

    async def close(self) -> None:
        """Let go of the engines and of those who route."""
        await self.publisher.close()
        for slot in self.fleet.all:
            try:
                await slot.close()
            except TurnoutError as error:
                _LOG.warning("engine not closed", replica_id=slot.replica_id, reason=error.reason)

    def timeout(self, seconds: float | None) -> float:
        """Wall seconds that an engine has."""
        return self.settings.engine_timeout if seconds is None else seconds
