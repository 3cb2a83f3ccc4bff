"""Lending hybrid replicas to generation, and taking them back.

Invariants: a replica is counted as taken back only when its engine confirmed that its memory is free; every step may
be repeated and then acts on what is left; routes change before engines do, so that nothing is sent to a replica that
is on its way out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from services.engine.book import Book
from services.engine.deadline import Deadline
from services.engine.domain.lends import Lends
from services.engine.domain.operations import Operation
from services.engine.domain.requests import JoinKey
from services.engine.domain.spec import Health, Role
from services.engine.fanout import ALREADY, FanOut, Result, Target, carry_out
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.engine.updating import Updating
from services.runtime.errors import TurnoutError, aborted, invalid_argument, require_id, require_non_negative


class Lending:
    """The transitions between trainer and generation. `routed` waits until those who route know the routes."""

    def __init__(
        self,
        fleet: Fleet,
        fan_out: FanOut,
        updating: Updating,
        lends: Lends,
        book: Book,
        routed: Callable[[], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._fan_out = fan_out
        self._updating = updating
        self._lends = lends
        self._book = book
        self._routed = routed

    async def begin(
        self,
        lend_id: str,
        replica_ids: Sequence[str],
        keep_sessions: bool,
        timeout: float,
        wanted: Mapping[Role, Sequence[JoinKey]] | None = None,
    ) -> tuple[Operation, tuple[str, ...]]:
        """Hold requests for hybrid replicas and wake their weight memory; returns the members of the lend.

        `wanted`: on replicas of which role running requests are to go on.
        """
        require_id("lend_id", lend_id)
        asked = self._hybrids(replica_ids)
        chosen = asked if replica_ids else [slot for slot in asked if slot.replica.health is Health.HEALTHY]
        members = self._lends.begin(lend_id, (slot.replica_id for slot in chosen))
        self._book.lend(lend_id)
        wanted = wanted or {}
        self._fleet.wishes.begin(wanted.get(Role.HYBRID, ()), wanted.get(Role.STANDALONE, ()))
        if not keep_sessions:
            self._fleet.placement.clear_sessions()

        return await self._hold(lend_id, members, timeout), members

    async def join(self, slot: Slot, timeout: float) -> None:
        """A hybrid replica has registered: it takes part in the lend that is open, if one is."""
        lend_id = self._lends.join(slot.replica_id)
        if not lend_id and any(True for _ in self._lends.all):
            slot.replica.arrived_late()
            slot.changed()
        if lend_id:
            self._book.lend(lend_id)
            await self._hold(lend_id, [slot.replica_id], timeout)

    async def _hold(self, lend_id: str, members: Iterable[str], timeout: float) -> Operation:
        async def action(slot: Slot, deadline: Deadline) -> Result:
            try:
                async with slot.exclusive(deadline) as replica:
                    self._refuse_gone(lend_id, slot)
                    joined = not replica.lend_id
                    plan = replica.begin_lend(lend_id)
                    slot.changed()
                    result = await carry_out(slot, plan, deadline)
                    return Result() if joined and result.skipped == ALREADY else result
            except TurnoutError:
                slot.replica.fail_lend()
                slot.changed()
                raise

        return await self._fan_out.run("BeginLend", Target(self._present(members), timeout), action)

    async def finish(self, lend_id: str, weight_version: int, timeout: float) -> Operation:
        """Let the members of a lend serve under this weight version."""
        require_non_negative("weight_version", weight_version)
        members = self._lends.require_open(lend_id)

        async def action(slot: Slot, deadline: Deadline) -> Result:
            try:
                async with slot.exclusive(deadline) as replica:
                    self._refuse_gone(lend_id, slot)
                    result = await carry_out(slot, replica.plan_finish_lend(weight_version), deadline)
                    # It may have been taken back while its engine was busy.
                    self._refuse_gone(lend_id, slot)
                    if not result.skipped:
                        replica.finish_lend()
                    return result
            except TurnoutError:
                # Requests that wait for it go elsewhere; repeating the call makes it good.
                slot.replica.fail_lend()
                slot.changed()
                raise

        return await self._fan_out.run("FinishLend", Target(self._present(members), timeout), action)

    async def abort(self, lend_id: str, timeout: float) -> Operation:
        """Undo a lend, however far it came; its id never opens again. A repeat frees what is left."""
        require_id("lend_id", lend_id)
        slots = self._present(self._lends.abort(lend_id))
        self._book.lend(lend_id)
        operation, _ = await self._take_back("AbortLend", slots, timeout)
        return operation

    async def reclaim(self, replica_ids: Sequence[str], timeout: float) -> tuple[Operation, int]:
        """Take hybrid replicas back; returns how many requests were interrupted."""
        return await self._take_back("Reclaim", self._hybrids(replica_ids), timeout)

    async def _take_back(self, kind: str, slots: Sequence[Slot], timeout: float) -> tuple[Operation, int]:
        ids = [slot.replica_id for slot in slots]
        interrupted = sum(self._fleet.placement.load(replica_id) for replica_id in ids)
        open_lend = self._lends.lend_id
        self._lends.reclaim(ids)
        if open_lend:
            self._book.lend(open_lend)
        if not self._lends.lend_id:
            self._fleet.wishes.clear()
        self._fleet.placement.clear_sessions(ids)
        for slot in slots:
            slot.replica.withdraw()
            self._updating.forget(slot.replica_id)
            slot.changed()

        async def action(slot: Slot, deadline: Deadline) -> Result:
            await self._routed()
            async with slot.exclusive(deadline) as replica:
                if replica.confirmed_free:
                    # As it was told last; its engine may have been started anew since.
                    await slot.refresh(deadline.left)
                result = await carry_out(slot, replica.plan_free(), deadline)
                if not replica.confirmed_free:
                    raise aborted(
                        "NOT_CONFIRMED",
                        f"the engine of {replica.replica_id} does not confirm that its memory is free",
                        replica_id=replica.replica_id,
                    )
                return result

        try:
            operation = await self._fan_out.run(kind, Target(slots, timeout), action)
        finally:
            self._lends.reclaimed(ids)
        return operation, interrupted

    async def free_stray(self, slot: Slot, timeout: float) -> None:
        """Free an engine that somebody started on GPUs of the trainer. Raises what it fails with."""
        deadline = Deadline(timeout)
        async with slot.exclusive(deadline) as replica:
            if replica.stray:
                await carry_out(slot, replica.plan_free(), deadline)

    async def give_up(self, timeout: float) -> None:
        """Abort the lend of an earlier trainer, if one is open."""
        if self._lends.lend_id:
            await self.abort(self._lends.lend_id, timeout)

    def forget(self, replica_id: str) -> None:
        """A replica was deregistered."""
        lend_id = self._lends.lend_id
        self._lends.drop([replica_id])
        if lend_id:
            self._book.lend(lend_id)

    def _hybrids(self, replica_ids: Iterable[str]) -> list[Slot]:
        ids = list(replica_ids)
        if not ids:
            return self._fleet.select(roles=[Role.HYBRID])
        slots = self._fleet.select(ids)
        for slot in slots:
            if slot.replica.spec.role is not Role.HYBRID:
                raise invalid_argument(
                    "replica_ids", f"{slot.replica_id!r} is not hybrid", value=slot.replica_id, reason="NOT_HYBRID"
                )
        return slots

    def _present(self, members: Iterable[str]) -> list[Slot]:
        wanted = set(members)
        return [slot for slot in self._fleet.all if slot.replica_id in wanted]

    def _refuse_gone(self, lend_id: str, slot: Slot) -> None:
        if self._lends.lend_id != lend_id or slot.replica_id not in self._lends.members:
            raise aborted(
                "LEND_CLOSED",
                f"{slot.replica_id} was taken back meanwhile",
                replica_id=slot.replica_id,
                lend_id=lend_id,
            )
