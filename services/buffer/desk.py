"""Desk: the runs of the service, and what every change of them sets off.

Invariants: each change of a partition is followed by `changed` before anything else runs, which evicts, shows refill
claims, ends waits and wakes workers and watchers; what ends by itself is ended by one task that sleeps until the
earliest expiry. Nothing polls. Every decision is recorded in the turn in which it was made, after it was; whoever tells
of it awaits `durable` first.
"""

import asyncio
import secrets
from collections.abc import Iterable

from services.buffer.alarm import Alarm
from services.buffer.domain import expiry
from services.buffer.domain.config import RunConfig
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.pump import Pumped
from services.buffer.domain.run import Run
from services.buffer.domain.runs import Runs, run_not_found
from services.buffer.domain.waits import Wait, WaitEnd
from services.buffer.domain.work import next_group
from services.buffer.memory import Memory
from services.buffer.parking import ParkedWait, PartitionParking, RunParking, wake_in_turns
from services.buffer.storage.replay import run_prefix
from services.buffer.wire.config import config_to
from services.runtime.clock import Clock, ContinuedClock
from services.runtime.errors import TurnoutError, resource_exhausted, stale_epoch, unavailable
from services.runtime.journal import Durable, Journal
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick
from turnout.buffer.storage.v1 import storage_pb2 as st

_log = get_logger("buffer")

# Wall seconds over which changes are gathered into one PROGRESS event: fast for a person, rare for a machine.
PROGRESS_GATHER_S = 0.25


class Desk:
    """All runs of one service, with their parked calls."""

    def __init__(self, clock: Clock, store: PayloadStore) -> None:
        self.clock = clock
        self.memory = Memory()
        self.incarnation = secrets.token_hex(8)
        self.journal: Journal | None = None
        self.compaction_due = asyncio.Event()
        # Somebody was refused since the disk is full.
        self.space_wanted = asyncio.Event()
        # Held from the first record of a restore to its last, and where a snapshot begins: one that began in between
        # would take the place of the records of half a restore.
        self.restoring = asyncio.Lock()
        self.store = store
        self._parking: dict[str, RunParking] = {}
        self._id_prefix = self.incarnation[:8]
        self._suspended: TurnoutError | None = None
        self._alarm = Alarm()

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.clock.now(), self.clock.wall())

    @property
    def runs(self) -> Runs:
        """The runs."""
        return self.memory.runs

    # -------------------------------------------------------------------------------------------------------- decisions

    def begin(self, memory: Memory, journal: Journal) -> None:
        """Go on from what was loaded; the journal takes every decision from here on."""
        if self.clock.now() < memory.now or self.journal is None:
            self.clock = ContinuedClock(self.clock, memory.now)
        self.memory = memory
        self.journal = journal
        self._suspended = None
        self._id_prefix = secrets.token_hex(4)
        at = self.moment()
        record = st.Record(now=at.now, wall=at.wall, boot=st.Boot(id_prefix=self._id_prefix))
        journal.append("buffer", record.SerializeToString())
        for run in memory.runs:
            run.restart(run_prefix(self._id_prefix, run), at)
            self._parking[run.run_id] = RunParking(run)
            self.rearm(run)

    def suspend(self, error: TurnoutError) -> None:
        """Forget everything: memory holds what is not stored. Calls end with `error` until `begin`."""
        self._suspended = error
        for parking in self._parking.values():
            parking.end(error)
        self._parking.clear()
        books = [book for _, book in self.memory.externals]
        self.memory = Memory()
        for book in books:
            book.wake()

    def check(self) -> None:
        """Raise what calls end with at present, if they must."""
        if self._suspended is not None:
            error = self._suspended
            raise TurnoutError(error.code, error.reason, error.message, error.metadata)

    def check_space(self) -> None:
        """Raise RESOURCE_EXHAUSTED / DISK_FULL while the disk has only room for what frees some."""
        if self.journal is not None and self.journal.short_of_space:
            self.space_wanted.set()
            raise resource_exhausted("DISK_FULL", "the disk of the buffer is full; what frees space still works")

    def record(self, run: Run, record: st.Record, at: Moment) -> None:
        """Take down a decision on a run that was made in this turn. Raises what the journal cannot do."""
        if self.runs.get(run.run_id) is not run:
            raise _replaced(run.run_id)
        self.record_external(run.run_id, record, at)

    def record_external(self, run_id: str, record: st.Record, at: Moment) -> None:
        """Take down a decision on the external payloads of a run, which may be gone."""
        if self.journal is None:
            return
        record.now, record.wall = at
        self.journal.append(run_id, record.SerializeToString())
        if self.journal.compaction_due:
            self.compaction_due.set()

    def promise(self) -> Durable | None:
        """The promise that everything decided so far becomes durable; None if nothing is stored."""
        return None if self.journal is None else self.journal.tail()

    async def durable(self) -> None:
        """Return once everything decided so far is durable. Raises why it is not."""
        if self.journal is not None:
            await self.journal.tail()

    # ------------------------------------------------------------------------------------------------------------ runs

    def create(self, run_id: str, config: RunConfig, record: st.Record) -> Run:
        """Add a new run. Raises INVALID_ARGUMENT, or ALREADY_EXISTS / RUN_EXISTS. `record` has the request's id."""
        number = self.memory.created + 1
        prefix = f"{self._id_prefix}.{number:x}"
        at = self.moment()
        external = self.memory.externals.of(run_id)
        run = Run(run_id, config, id_prefix=prefix, store=self.store, at=at, external=external)
        self.runs.add(run)
        self.memory.created = number
        record.create_run.config.CopyFrom(config_to(config))
        record.create_run.id_prefix = prefix
        self.record(run, record, at)
        self._parking[run_id] = RunParking(run)
        return run

    def replaced(self, run_id: str, error: TurnoutError) -> None:
        """A run got new content; what is parked on the old one ends."""
        self._parking.pop(run_id).end(error)
        run = self.runs.require(run_id)
        self._parking[run_id] = RunParking(run)
        self.changed(run, *run.partitions.values())

    def delete(self, run: Run, record: st.Record) -> None:
        """Forget a run, what it holds excepted; what is parked on it ends."""
        record.delete_run = True
        self.record(run, record, self.moment())
        self.runs.remove(run)
        self.memory.externals.discard_empty(run.run_id)
        self.memory.forget_answers(run.run_id)
        self._parking.pop(run.run_id).end(run_not_found(run.run_id))

    def parking(self, run: Run) -> RunParking:
        """The calls parked on a run.

        Raises NOT_FOUND / RUN_NOT_FOUND if it was deleted meanwhile, UNAVAILABLE if it is another one now or is loaded
        again: then the call may be repeated.
        """
        parking = self._parking.get(run.run_id)
        if parking is not None and parking.run is run:
            return parking
        self.check()
        self.runs.require(run.run_id)
        raise _replaced(run.run_id)

    def fence(self, run: Run, waits: Iterable[Wait]) -> None:
        """End the waits of trainers that were superseded."""
        fenced = {id(wait) for wait in waits}
        for partition in self.parking(run).partitions.values():
            for parked in partition.waits.values():
                if id(parked.wait) in fenced:
                    parked.end(stale_epoch(parked.wait.epoch, run.state.epoch))

    # ----------------------------------------------------------------------------------------------- external payloads

    def hold(self, run: Run, checkpoint_id: str) -> None:
        """A checkpoint of the run begins; it holds the external payloads that are named now."""
        book = run.state.payloads.external
        if book.named:
            book.hold(checkpoint_id)
            self.record(run, st.Record(hold=checkpoint_id), self.moment())

    def unhold(self, run_id: str, checkpoint_id: str) -> None:
        """A checkpoint of a run, which may be gone, is gone or did not come about."""
        book = self.memory.externals.get(run_id)
        if book is not None and checkpoint_id in book.holds:
            book.unhold(checkpoint_id)
            self.record_external(run_id, st.Record(unhold=checkpoint_id), self.moment())
            self.external_changed(run_id)

    def acknowledge(self, run_id: str, store: str, ids: Iterable[str]) -> int:
        """The owner of a store deleted payloads of a run, which may be gone. Returns how many were still told of.

        Raises NOT_FOUND / RUN_NOT_FOUND.
        """
        book = self.memory.externals.get(run_id)
        if book is None:
            raise run_not_found(run_id)
        known = book.acknowledge(store, ids)
        if known:
            self.record_external(run_id, st.Record(ack=st.Ack(store=store, ids=known)), self.moment())
            self.external_changed(run_id)
        return len(known)

    def external_changed(self, run_id: str) -> None:
        """If the run is gone and nothing can come of its book any more, that goes too."""
        if self.runs.get(run_id) is None:
            self.memory.externals.discard_empty(run_id)

    # --------------------------------------------------------------------------------------------------------- changes

    def contact(self, run: Run, step: int | None = None) -> None:
        """The present trainer has called; a step that advances changes what is due in every partition."""
        before = run.state.step
        at = self.moment()
        run.contact(at, step)
        if run.state.step != before:
            self.record(run, st.Record(step=run.state.step), at)
            self.changed(run, *run.partitions.values())

    def changed(self, run: Run, *partitions: Partition) -> None:
        """Something changed in these partitions."""
        parking = self._parking.get(run.run_id)
        if parking is None or parking.run is not run:
            return
        at = self.moment()
        for partition in partitions:
            self._changed(parking.partitions[partition.name], run, at)
        for watch in parking.group_watches:
            watch.wake.set()
        self.rearm(run)

    def _changed(self, parking: PartitionParking, run: Run, at: Moment) -> None:
        partition = parking.partition
        pumped = run.pump(partition, at)
        if self.journal is not None:
            self._record_pumped(run, partition, pumped, at)
        if pumped.more and not parking.going_on:
            # Other runs get their turn in between.
            parking.going_on = True
            asyncio.get_running_loop().call_soon(self._go_on, run, parking)
        told: list[ParkedWait] = []
        for wait, claim in pumped.refills:
            parked = parking.waits[wait.order]
            parked.refills.append(claim)
            told.append(parked)
        for wait, end in pumped.ended:
            parked = parking.waits[wait.order]
            parked.ended = end
            told.append(parked)
        if told:
            self._wake_once_durable(told)
        if parking.claims and next_group(partition) is not None:
            next(iter(parking.claims.values())).wake.set()
        # Whoever watches sees what comes of many slices, not each.
        if not pumped.more:
            wake_in_turns(list(parking.depth_watches))
        if parking.waits and parking.progress_timer is None and partition.index.counts != parking.told:
            loop = asyncio.get_running_loop()
            parking.progress_timer = loop.call_later(PROGRESS_GATHER_S, self._tell_progress, parking)

    def _go_on(self, run: Run, parking: PartitionParking) -> None:
        parking.going_on = False
        try:
            self.changed(run, parking.partition)
        except TurnoutError as error:
            # What cannot be recorded ends the waits of the run in its own way.
            _log.warning("an eviction was cut short", run_id=run.run_id, reason=error.reason)

    def _wake_once_durable(self, told: list[ParkedWait]) -> None:
        """Wake calls for what was just decided on them; not before they may tell of it, so that each wakes once."""

        def wake(_: object = None) -> None:
            wake_in_turns(told)

        decided = self.promise()
        if decided is None:
            wake()
            return
        for parked in told:
            parked.decided = decided
        decided.add_done_callback(wake)

    def _record_pumped(self, run: Run, partition: Partition, pumped: Pumped, at: Moment) -> None:
        name = partition.name
        if pumped.evicted_at is not None:
            evicted = st.EvictDue(partition=name, step=pumped.evicted_at, group_ids=pumped.evicted)
            self.record(run, st.Record(evict_due=evicted), at)
        if pumped.made_claim:
            self.record(run, st.Record(show_refill=name), at)
        for lease in pumped.leases:
            taken = st.Lease(partition=name, step=lease.step, batch=len(lease.group_ids), auto_commit=lease.auto_commit)
            said = st.Record(lease=taken, request_id=lease.request_id, fingerprint=lease.fingerprint)
            self.record(run, said, at)
        if pumped.sealed:
            self.record(run, st.Record(seal=name), at)

    def sealed(self, run: Run, partition: Partition, *, before: bool) -> None:
        """Take down that an eviction cursor was handed out, if that is new. `before`: whether the log was sealed."""
        if not before and partition.evictions.sealed:
            self.record(run, st.Record(seal=partition.name), self.moment())

    def time_out(self, run: Run, partition: Partition, wait: Wait) -> WaitEnd:
        """The time of a wait has passed."""
        before = partition.evictions.sealed
        ended = run.time_out(partition, wait, self.moment())
        self.sealed(run, partition, before=before)
        return ended

    @staticmethod
    def _tell_progress(parking: PartitionParking) -> None:
        parking.progress_timer = None
        parking.told = parking.partition.index.snapshot()
        for parked in parking.waits.values():
            parked.progress_due = True
        wake_in_turns(list(parking.waits.values()))

    def tell(self, run: Run, events: Iterable[GroupEvent]) -> None:
        """Pass progress on to those who watch the groups."""
        watches = self.parking(run).group_watches
        for event in events if watches else ():
            for watch in watches:
                watch.progress[(event.partition, event.group_id, event.index)] = event
                watch.wake.set()

    # ----------------------------------------------------------------------------------------------------------- waits

    def park(self, run: Run, partition: Partition, wait: Wait) -> ParkedWait:
        """Enter a wait to be told what it waits for."""
        parked = ParkedWait(wait)
        self.parking(run).partitions[partition.name].waits[wait.order] = parked
        return parked

    def leave(self, run: Run, partition: Partition, parked: ParkedWait, *, changed: bool) -> None:
        """The call of a wait is over; `changed`: its end changed the partition."""
        parking = self._parking.get(run.run_id)
        if parking is None or parking.run is not run:
            return
        place = parking.partitions[partition.name]
        place.waits.pop(parked.wait.order, None)
        if not place.waits and place.progress_timer is not None:
            place.progress_timer.cancel()
            place.progress_timer = None
        if run.close_wait(partition, parked.wait, self.moment()) or changed:
            self.changed(run, partition)

    # ------------------------------------------------------------------------------------------------------------ time

    def rearm(self, run: Run) -> None:
        """See to it that the earliest expiry of the run is not slept through."""
        self._alarm.set(expiry.next_expiry(run))

    async def expire(self, tick: Tick) -> None:
        """End what ends by itself; never returns."""
        while True:
            await self._alarm.sleep(self.clock, self._next_expiry)
            self._expire_due()
            tick()

    def _next_expiry(self) -> float | None:
        return min((at for run in self.runs if (at := expiry.next_expiry(run)) is not None), default=None)

    def _expire_due(self) -> None:
        at = self.moment()
        for run in self.runs:
            due = expiry.next_expiry(run)
            if due is not None and due <= at.now:
                over = expiry.expired(run, at)
                changed = expiry.expire(run, over, at)
                if over:
                    expire = st.Expire(
                        claims=over.claims, leases=over.leases, retained=over.retained, uploads=over.uploads
                    )
                    self.record(run, st.Record(expire=expire), at)
                self.changed(
                    run, *{partition.name: partition for partition in [*changed, *expiry.refills_due(run, at)]}.values()
                )


def _replaced(run_id: str) -> TurnoutError:
    return unavailable("RUN_REPLACED", "the run was restored or loaded again meanwhile", run_id=run_id)
