"""The replicas of the run and who is interested in them.

Invariants: a replica is added only after its engine answered a probe, and once; no GPU belongs to two hybrid
replicas; every change of a route is seen by whoever watches routes, every change of a replica by whoever watches
replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from services.engine.backends.base import Backend
from services.engine.backends.unopened import unopened
from services.engine.book import Book
from services.engine.changes import Changes
from services.engine.domain.blackout import BlackoutMeter
from services.engine.domain.kept import Kept
from services.engine.domain.placement import Placement
from services.engine.domain.replica import Replica
from services.engine.domain.requests import JoinKey
from services.engine.domain.spec import ReplicaSpec, Role, Route
from services.engine.domain.wishes import Wishes
from services.engine.slot import Slot
from services.runtime.clock import Clock
from services.runtime.errors import Code, TurnoutError, already_exists, failed_precondition, not_found, unavailable

OpenBackend = Callable[[ReplicaSpec], Awaitable[Backend]]
"""Connects to the engine of a replica; refuses unknown backends and options with INVALID_ARGUMENT."""


class Fleet:
    """All replicas of one controller. `probe_timeout` is in wall seconds."""

    def __init__(self, clock: Clock, open_backend: OpenBackend, probe_timeout: float, book: Book) -> None:
        self.placement = Placement()
        self.wishes = Wishes()
        self.routes = Changes()
        self.replicas = Changes()
        self.blackout = BlackoutMeter(clock.now())
        self._clock = clock
        self._open_backend = open_backend
        self._probe_timeout = probe_timeout
        self._book = book
        self._slots: dict[str, Slot] = {}
        self._known_routes: dict[str, Route] = {}
        self._arriving: dict[str, tuple[ReplicaSpec, asyncio.Event]] = {}

    # ---------------------------------------------------------------------------------------------------- registration

    async def register(self, spec: ReplicaSpec) -> Slot:
        """Add a replica; the same spec again gives the one that is there."""
        spec.validate()
        while (arriving := self._arriving.get(spec.replica_id)) is not None:
            await arriving[1].wait()
        known = self._slots.get(spec.replica_id)
        if known is not None:
            if known.replica.spec == spec:
                return known
            raise already_exists(
                "REPLICA_EXISTS", f"{spec.replica_id!r} is registered with another spec", replica_id=spec.replica_id
            )
        self._refuse_taken_gpus(spec)
        arrived = asyncio.Event()
        self._arriving[spec.replica_id] = (spec, arrived)
        try:
            slot = await self._open(spec)
        finally:
            del self._arriving[spec.replica_id]
            arrived.set()
        self._add(slot)
        return slot

    def restore(self, kept: Kept) -> Slot:
        """Add a replica that an earlier controller knew; its engine is still to be opened, with `reopen`."""
        slot = self._slot(Replica.restored(kept), unopened(kept.spec.replica_id))
        self._add(slot)
        return slot

    async def reopen(self, slot: Slot) -> None:
        """Open the engine of a restored replica and probe it. Raises what keeps the engine from being opened."""
        backend = await self._open_backend(slot.replica.spec)
        if not self.holds(slot):
            await backend.close()
            return
        slot.backend = backend
        await slot.probe_in_background()

    def deregister(self, replica_id: str) -> Slot:
        """Take a replica out. Whoever calls sends its requests elsewhere and closes the slot."""
        slot = self.get(replica_id)
        del self._slots[replica_id]
        self.placement.remove(replica_id)
        self._book.removed(replica_id)
        # Whoever watches its engine lets go of it, before it is closed.
        slot.probe_wanted.set()
        self._changed(slot)
        return slot

    def _slot(self, replica: Replica, backend: Backend) -> Slot:
        return Slot(replica, backend, self._probe_timeout, self._changed, self._book.durable)

    def _add(self, slot: Slot) -> None:
        self._slots[slot.replica_id] = slot
        self.placement.add(slot.replica_id)
        slot.changed()

    async def _open(self, spec: ReplicaSpec) -> Slot:
        backend = await self._open_backend(spec)
        try:
            return self._slot(await self._first_probe(spec, backend), backend)
        except BaseException:
            await backend.close()
            raise

    async def _first_probe(self, spec: ReplicaSpec, backend: Backend) -> Replica:
        try:
            async with asyncio.timeout(self._probe_timeout):
                state = await backend.probe()
        except (TimeoutError, TurnoutError) as error:
            if isinstance(error, TurnoutError) and error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise
            why = error.message if isinstance(error, TurnoutError) else "it did not answer in time"
            raise unavailable(
                "ENGINE_UNREACHABLE",
                f"the engine of {spec.replica_id!r} cannot be probed: {why}",
                replica_id=spec.replica_id,
                field="spec.endpoint",
                value=spec.endpoint,
            ) from error
        return Replica(spec, state)

    def _refuse_taken_gpus(self, spec: ReplicaSpec) -> None:
        if spec.role is not Role.HYBRID:
            return
        others = [slot.replica.spec for slot in self._slots.values()] + [other for other, _ in self._arriving.values()]
        for other in others:
            shared = set(spec.gpus) & set(other.gpus)
            if shared and other.role is Role.HYBRID:
                gpu = min(shared)
                raise failed_precondition(
                    "GPU_TAKEN",
                    f"GPU {gpu.uuid!r} of node {gpu.node!r} belongs to {other.replica_id!r}",
                    field="spec.gpus",
                    node=gpu.node,
                    uuid=gpu.uuid,
                    replica_id=other.replica_id,
                )

    # --------------------------------------------------------------------------------------------------------- reading

    def get(self, replica_id: str) -> Slot:
        """The replica, or NOT_FOUND / REPLICA_NOT_FOUND."""
        slot = self._slots.get(replica_id)
        if slot is None:
            raise not_found("REPLICA_NOT_FOUND", f"no replica {replica_id!r}", replica_id=replica_id)
        return slot

    def holds(self, slot: Slot) -> bool:
        """Whether this very slot is still registered."""
        return self._slots.get(slot.replica_id) is slot

    def select(self, replica_ids: Iterable[str] = (), roles: Iterable[Role] = ()) -> list[Slot]:
        """Replicas by id; both empty is all of them."""
        ids = set(replica_ids)
        chosen = [self.get(replica_id) for replica_id in sorted(ids)] if ids else self.all
        wanted = set(roles)
        return [slot for slot in chosen if not wanted or slot.replica.spec.role in wanted]

    @property
    def all(self) -> list[Slot]:
        """All replicas, by id."""
        return [self._slots[replica_id] for replica_id in sorted(self._slots)]

    def usable(self) -> list[str]:
        """Replicas on which requests may be placed, those that serve first."""
        routes = [(slot.replica_id, slot.replica.route) for slot in self.all]
        return [replica_id for wanted in (Route.SERVING, Route.HELD) for replica_id, route in routes if route is wanted]

    def usable_for(self, key: JoinKey | None) -> list[str]:
        """Those of them where the request is wanted; all of them if it is wanted nowhere, or where none is usable."""
        usable, role = self.usable(), self.wishes.role(key)
        wanted = [replica_id for replica_id in usable if self._slots[replica_id].replica.spec.role is role]
        return wanted or usable

    # --------------------------------------------------------------------------------------------------------- changes

    def _changed(self, slot: Slot) -> None:
        self.replicas.notify()
        # One that was deregistered may change after another took its id.
        current = self._slots.get(slot.replica_id)
        if current is slot:
            self._book.replica(slot.replica)
        route = current.replica.route if current else None
        if self._known_routes.get(slot.replica_id) is route:
            return
        if route is None:
            del self._known_routes[slot.replica_id]
        else:
            self._known_routes[slot.replica_id] = route
        self.blackout.change(self._clock.now(), Route.SERVING in self._known_routes.values())
        self.routes.notify()
