"""Desk: the runs of the service, and what every change of them sets off.

Invariants: each change of a partition is followed by `changed` before anything else runs, which evicts, shows refill
claims, ends waits and wakes workers and watchers; what ends by itself is ended by one task that sleeps until the
earliest expiry. Nothing polls.
"""

import asyncio
import secrets
from collections.abc import Iterable

from services.buffer.domain.config import RunConfig
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.run import Run
from services.buffer.domain.runs import Runs, run_not_found
from services.buffer.domain.waits import Wait
from services.buffer.domain.work import next_group
from services.buffer.parking import ParkedWait, PartitionParking, RunParking
from services.runtime.clock import Clock
from services.runtime.errors import stale_epoch
from services.runtime.tasks import Tick

# Wall seconds over which changes are gathered into one PROGRESS event: fast for a person, rare for a machine.
PROGRESS_GATHER_S = 0.25


class Desk:
    """All runs of one service, with their parked calls."""

    def __init__(self, clock: Clock, store: PayloadStore) -> None:
        self.clock = clock
        self.runs = Runs()
        self.incarnation = secrets.token_hex(8)
        self._store = store
        self._parking: dict[str, RunParking] = {}
        self._created = 0
        self._rearm = asyncio.Event()
        self._armed: float | None = None

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.clock.now(), self.clock.wall())

    # ------------------------------------------------------------------------------------------------------------ runs

    def create(self, run_id: str, config: RunConfig) -> Run:
        """Add a new run. Raises INVALID_ARGUMENT, or ALREADY_EXISTS / RUN_EXISTS."""
        self._created += 1
        prefix = f"{self.incarnation[:6]}.{self._created:x}"
        run = Run(run_id, config, id_prefix=prefix, store=self._store, at=self.moment())
        self.runs.add(run)
        self._parking[run_id] = RunParking(run)
        return run

    def delete(self, run: Run) -> None:
        """Forget a run; what is parked on it ends."""
        self.runs.remove(run)
        self._parking.pop(run.run_id).end(run_not_found(run.run_id))

    def parking(self, run: Run) -> RunParking:
        """The calls parked on a run. Raises NOT_FOUND / RUN_NOT_FOUND if it was deleted meanwhile."""
        parking = self._parking.get(run.run_id)
        if parking is None or parking.run is not run:
            raise run_not_found(run.run_id)
        return parking

    def fence(self, run: Run, waits: Iterable[Wait]) -> None:
        """End the waits of trainers that were superseded."""
        fenced = {id(wait) for wait in waits}
        for partition in self.parking(run).partitions.values():
            for parked in partition.waits.values():
                if id(parked.wait) in fenced:
                    parked.end(stale_epoch(parked.wait.epoch, run.state.epoch))

    # --------------------------------------------------------------------------------------------------------- changes

    def contact(self, run: Run, step: int | None = None) -> None:
        """The present trainer has called; a step that advances changes what is due in every partition."""
        before = run.state.step
        run.contact(self.moment(), step)
        if run.state.step != before:
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
        for wait, claim in pumped.refills:
            parked = parking.waits[wait.order]
            parked.refills.append(claim)
            parked.wake.set()
        for wait, end in pumped.ended:
            parked = parking.waits[wait.order]
            parked.ended = end
            parked.wake.set()
        if parking.claims and next_group(partition) is not None:
            next(iter(parking.claims.values())).wake.set()
        for watch in parking.depth_watches:
            watch.wake.set()
        if parking.waits and parking.progress_timer is None:
            loop = asyncio.get_running_loop()
            parking.progress_timer = loop.call_later(PROGRESS_GATHER_S, self._tell_progress, parking)

    @staticmethod
    def _tell_progress(parking: PartitionParking) -> None:
        parking.progress_timer = None
        for parked in parking.waits.values():
            parked.progress_due = True
            parked.wake.set()

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

    def leave(self, run: Run, partition: Partition, parked: ParkedWait) -> None:
        """The call of a wait is over."""
        parking = self._parking.get(run.run_id)
        if parking is None or parking.run is not run:
            return
        place = parking.partitions[partition.name]
        place.waits.pop(parked.wait.order, None)
        if not place.waits and place.progress_timer is not None:
            place.progress_timer.cancel()
            place.progress_timer = None
        run.close_wait(partition, parked.wait, self.moment())
        self.changed(run, partition)

    # ------------------------------------------------------------------------------------------------------------ time

    def rearm(self, run: Run) -> None:
        """See to it that the earliest expiry of the run is not slept through."""
        due = run.next_expiry()
        if due is not None and (self._armed is None or due < self._armed):
            self._rearm.set()

    async def expire(self, tick: Tick) -> None:
        """End what ends by itself; never returns."""
        while True:
            self._rearm.clear()
            due = [at for run in self.runs if (at := run.next_expiry()) is not None]
            self._armed = min(due, default=None)
            if self._armed is None:
                await self._rearm.wait()
            elif self._armed > self.clock.now():
                timer = self.clock.call_at(self._armed, self._rearm.set)
                try:
                    await self._rearm.wait()
                finally:
                    timer.cancel()
            self._expire_due()
            tick()

    def _expire_due(self) -> None:
        at = self.moment()
        for run in self.runs:
            due = run.next_expiry()
            if due is not None and due <= at.now:
                self.changed(run, *run.expire(run.expired(at), at))
