"""Weight transactions over the replicas.

Invariants: a replica takes requests again only when its engine said that all weights arrived, its caches were reset
and its version was stamped; whoever is taken back in the middle leaves the transaction, half-updated if bytes had
come; one slow replica holds up the bytes of the others only once it is `BUFFERED_CHUNKS` behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from services.engine.book import Book
from services.engine.deadline import Deadline
from services.engine.domain.kept import UpdateKind
from services.engine.domain.operations import Operation
from services.engine.domain.replica import Replica
from services.engine.domain.spec import Gpu, Weights
from services.engine.domain.weights import Update, Updates, require_members, split_waves
from services.engine.fanout import ALREADY, FanOut, Result, Target
from services.engine.feed import Feed, hand_out
from services.engine.fleet import Fleet
from services.engine.meetings import Meetings
from services.engine.preparing import Preparing, refuse_gone
from services.engine.slot import Slot
from services.runtime.clock import Clock
from services.runtime.errors import (
    TurnoutError,
    aborted,
    failed_precondition,
    require_non_negative,
)
from services.runtime.logs import get_logger

_LOG = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Ack:
    """The trainer's word on one replica."""

    ok: bool
    checksum: str = ""


class Updating:
    """Opens, feeds, commits and aborts transactions."""

    def __init__(self, fleet: Fleet, fan_out: FanOut, updates: Updates, clock: Clock, prefix: str, book: Book) -> None:
        self._fleet = fleet
        self._fan_out = fan_out
        self._updates = updates
        self._clock = clock
        self._prefix = prefix
        self._book = book
        self._next = 1
        self._preparing = Preparing(fleet, fan_out, self._note)
        self.meetings = Meetings(updates)
        self._dark_before: dict[str, float] = {}
        self._orphans: set[str] = set()

    # ----------------------------------------------------------------------------------------------------- restart

    def restore(self, updates: Iterable[Update]) -> None:
        """Go on with the transactions of an earlier controller."""
        self._updates.restore(updates)
        dark = self._fleet.blackout.total(self._clock.now())
        for update in self._updates.open:
            self._dark_before[update.update_id] = dark - update.blackout
            if not update.answered:
                self._orphans.add(update.update_id)
        for slot in self._fleet.all:
            update_id = slot.replica.update_id
            if update_id and not self._updates.is_open(update_id):
                self._orphans.add(update_id)

    async def abandon_orphans(self, timeout: float) -> None:
        """End for their replicas what nobody can end any more: updates whose begin was not answered, ended ones."""
        for update_id in sorted(self._orphans):
            await self._abandon(update_id, timeout)

    async def _abandon(self, update_id: str, timeout: float) -> None:
        slots = [slot for slot in self._fleet.all if slot.replica.update_id == update_id]
        update = self._updates.open_one(update_id)
        if update is not None:
            update.aborted = True
            self._close(update)
        await self._take_out(update_id, update.touched if update else set(), slots, timeout)
        self._orphans.discard(update_id)

    def _takes_part(self, update_id: str, slot: Slot) -> bool:
        update = self._updates.open_one(update_id)
        chosen = update is not None and (slot.replica_id in update.wave or slot.replica_id in update.remaining)
        return chosen or slot.replica.update_id == update_id

    def answered(self, update: Update) -> None:
        """The trainer is being told the id of an update."""
        update.answered = True
        self._note(update)

    def _note(self, update: Update) -> None:
        self._book.update(update, self.blackout(update))

    # ------------------------------------------------------------------------------------------------------- begin

    async def begin(
        self,
        slots: Sequence[Slot],
        kind: UpdateKind,
        version: int,
        *,
        adapter: bool,
        keep_requests: bool,
        staggered: bool,
        allow_older: bool,
        timeout: float,
    ) -> tuple[Update, Operation]:
        """Open a transaction and prepare its first wave; fails only if no replica of it got ready."""
        require_non_negative("weight_version", version)
        if not slots:
            raise failed_precondition("NO_REPLICA", "no replica is selected", field="selector")
        for update_id in sorted(self._orphans):
            if any(self._takes_part(update_id, slot) for slot in slots):
                await self._abandon(update_id, timeout)
        for slot in slots:
            slot.replica.check_update(kind, version, adapter=adapter, allow_older=allow_older)
            self._refuse_member_of_another(slot)
        update = Update(f"{self._prefix}-u{self._next}", kind, version, adapter, keep_requests, allow_older)
        self._next += 1
        update.later = split_waves([slot.replica_id for slot in slots], staggered)
        self._updates.add(update)
        self._dark_before[update.update_id] = self._fleet.blackout.total(self._clock.now())
        operation = await self._open_wave(update, timeout)
        if not update.wave:
            self._close(update)
            raise operation.error() or aborted("UPDATE_CLOSED", "the replicas were taken away meanwhile")
        return update, operation

    async def _open_wave(self, update: Update, timeout: float) -> Operation:
        wave = set(update.next_wave())
        self._note(update)
        return await self._preparing.all(update, wave, timeout)

    # -------------------------------------------------------------------------------------------------------- feed

    async def feed(
        self,
        update_id: str,
        wave_index: int,
        replica_ids: Sequence[str],
        size: int,
        info_json: str,
        move_index: int,
        frames: AsyncIterator[bytes | int],
        timeout: float,
    ) -> Operation:
        """Move bytes to replicas of the wave. `frames` are chunks, the last one is their CRC32C as a number.

        `move_index`: which move to them it is within the wave; the last one's number replaces that one.
        """
        update = self._updates.require_open(update_id)
        update.require_wave(wave_index)
        require_non_negative("size", size)
        require_non_negative("move_index", move_index)
        require_members(update, replica_ids, "replica_ids")
        wanted = set(replica_ids) & update.wave if replica_ids else update.wave
        slots = [slot for slot in self._fleet.all if slot.replica_id in wanted]
        feeds = {slot.replica_id: Feed() for slot in slots}

        async def action(slot: Slot, deadline: Deadline) -> Result:
            feed = feeds[slot.replica_id]
            try:
                async with slot.exclusive(deadline) as replica:
                    refuse_gone(update, replica)
                    replica.check_commit()
                    await self._preparing.start(update, slot, replica, deadline)

                    async def touch() -> None:
                        refuse_gone(update, replica)
                        replica.touch()
                        update.touched.add(slot.replica_id)
                        self._note(update)
                        slot.changed()
                        await self._book.durable()

                    chunks = feed.chunks(touch, deadline)
                    work = slot.backend.update_weights(size, info_json, chunks, deadline.timeout, move_index)
                    await slot.command(work, deadline)
                    return Result()
            finally:
                feed.closed.set()

        moving = asyncio.ensure_future(self._fan_out.run("UpdateWeights", Target(slots, timeout), action))
        fault: TurnoutError | None = aborted("WEIGHTS_INCOMPLETE", "the stream ended before its last frame")
        try:
            fault = await hand_out(frames, size, list(feeds.values()))
        except TurnoutError as error:
            fault = error
        finally:
            for feed in feeds.values():
                await feed.put(fault)
        operation = await moving
        if fault is not None:
            raise fault
        return operation

    # ----------------------------------------------------------------------------------------------- commit, abort

    async def commit(
        self, update_id: str, wave_index: int, acks: Mapping[str, Ack], timeout: float
    ) -> tuple[Update, Operation]:
        """Stamp the acknowledged replicas of the wave and let them go on; then open the next wave."""
        update = self._updates.require_open(update_id)
        if wave_index == update.wave_index - 1:
            # That wave was committed, and the controller ended before it could say so.
            return update, await self._go_on(update, acks, timeout)
        update.require_wave(wave_index)
        require_members(update, acks, "acks")
        slots = [slot for slot in self._fleet.all if slot.replica_id in update.wave]

        async def action(slot: Slot, deadline: Deadline) -> Result:
            ack = acks.get(slot.replica_id)
            if ack is None or not ack.ok:
                raise aborted(
                    "NOT_ACKNOWLEDGED",
                    f"the trainer did not say that {slot.replica_id} has all weights",
                    replica_id=slot.replica_id,
                )
            async with slot.exclusive(deadline) as replica:
                await self._commit(update, slot, replica, ack, deadline)
            return Result()

        operation = await self._fan_out.run("CommitWeightUpdate", Target(slots, timeout), action)
        await self._open_next(update, timeout)
        return update, operation

    async def _go_on(self, update: Update, acks: Mapping[str, Ack], timeout: float) -> Operation:
        """Prepare the present wave again, and answer for the one before it."""
        await self._preparing.all(update, set(update.wave), timeout)
        await self._open_next(update, timeout)

        async def action(slot: Slot, deadline: Deadline) -> Result:
            return Result(skipped=ALREADY)

        slots = [slot for slot in self._fleet.all if slot.replica_id in acks]
        return await self._fan_out.run("CommitWeightUpdate", Target(slots, timeout), action)

    async def _open_next(self, update: Update, timeout: float) -> None:
        while not update.wave and update.later:
            await self._open_wave(update, timeout)
        if update.complete:
            self._close(update)

    async def _commit(self, update: Update, slot: Slot, replica: Replica, ack: Ack, deadline: Deadline) -> None:
        refuse_gone(update, replica)
        replica.check_commit()
        if slot.replica_id not in update.finished:
            await self._preparing.start(update, slot, replica, deadline)
            await slot.command(slot.backend.finish_weight_update(ack.checksum, deadline.left), deadline)
            refuse_gone(update, replica)
            update.finished.add(slot.replica_id)
            self._note(update)
        await slot.carry_out(replica.stamp(update.version, update.adapter), deadline)
        refuse_gone(update, replica)
        replica.close_update()
        update.drop(slot.replica_id)
        self._note(update)
        slot.changed()
        await slot.refresh(deadline.left)
        if not update.adapter and replica.weights is not Weights.INTACT:
            raise aborted(
                "NOT_CONFIRMED",
                f"the engine of {replica.replica_id} does not confirm that its weights are complete",
                replica_id=replica.replica_id,
            )

    async def abort(self, update_id: str, timeout: float) -> tuple[Operation, list[str]]:
        """Give a transaction up; returns the replicas that are half-updated now."""
        update = self._updates.find(update_id)
        if not update.aborted:
            self._updates.require_open(update_id)
        update.aborted = True
        wave = set(update.wave)
        slots = [slot for slot in self._fleet.all if slot.replica_id in wave or slot.replica.update_id == update_id]
        self._close(update)
        return await self._take_out(update_id, update.touched, slots, timeout)

    async def _take_out(
        self, update_id: str, touched_ids: Set[str], slots: Sequence[Slot], timeout: float
    ) -> tuple[Operation, list[str]]:
        half_updated: list[str] = []

        async def action(slot: Slot, deadline: Deadline) -> Result:
            # Until the engine says otherwise it must be taken as touched.
            touched = True
            try:
                async with slot.exclusive(deadline) as replica:
                    if replica.update_id != update_id:
                        return Result(skipped="LEFT_UPDATE")
                    work = slot.backend.abort_weight_update(deadline.left)
                    touched = await slot.command(work, deadline) or slot.replica_id in touched_ids
                    await slot.carry_out(replica.plan_abandon(touched), deadline)
                    return Result()
            finally:
                if slot.replica.update_id == update_id:
                    slot.replica.plan_abandon(touched=True)
                if touched:
                    half_updated.append(slot.replica_id)
                slot.changed()

        operation = await self._fan_out.run("AbortWeightUpdate", Target(slots, timeout), action)
        return operation, sorted(half_updated)

    async def give_up(self, timeout: float) -> None:
        """Abort the transactions of an earlier trainer."""
        for update in self._updates.open:
            await self.abort(update.update_id, timeout)

    def blackout(self, update: Update) -> float:
        """Domain seconds of this transaction during which nothing was decoding."""
        if update.closed:
            return update.blackout
        return self._fleet.blackout.total(self._clock.now()) - self._dark_before[update.update_id]

    # ------------------------------------------------------------------------------------------------ vacated GPUs

    def vacated(self, update_id: str, gpus: Iterable[Gpu]) -> list[Gpu]:
        """The trainer freed these devices; returns those of the transaction that are missing."""
        update = self._updates.find(update_id)
        freed = frozenset(gpus)
        missing: set[Gpu] = set()
        for slot in self._fleet.all:
            if slot.replica_id in update.members:
                slot.replica.vacate(freed)
                missing |= slot.replica.unvacated
                slot.changed()
        return sorted(missing)

    # ----------------------------------------------------------------------------------------------------- helpers

    def forget(self, replica_id: str) -> None:
        """A replica was deregistered or taken back."""
        for update in self._updates.open:
            if replica_id in update.wave or replica_id in update.remaining:
                update.drop(replica_id)
                self._note(update)
                if update.complete:
                    self._close(update)

    def _close(self, update: Update) -> None:
        if update.closed:
            return
        update.blackout = self.blackout(update)
        update.closed = True
        update.wave.clear()
        update.later.clear()
        del self._dark_before[update.update_id]
        self.meetings.forget(update.update_id)
        self._note(update)

    def _refuse_member_of_another(self, slot: Slot) -> None:
        for update in self._updates.open:
            if slot.replica_id in update.wave or slot.replica_id in update.remaining:
                raise failed_precondition(
                    "UPDATE_OPEN",
                    f"{slot.replica_id} is in weight update {update.update_id!r}",
                    replica_id=slot.replica_id,
                    update_id=update.update_id,
                )
