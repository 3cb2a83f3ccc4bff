"""Parking: who is parked on a run, to be woken by what changes in it.

Invariants: nobody polls; a call that is over is parked nowhere; waking is coalesced, so a slow reader sees the newest
state and not every one on the way.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.buffer.domain.caps import cap_reached
from services.buffer.domain.depth import Counts
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.partition import Partition
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.run import Run
from services.buffer.domain.waits import Wait, WaitEnd
from services.runtime.errors import TurnoutError
from services.runtime.journal import Durable
from services.runtime.waits import Wake

# Some 40 ms of work; with less, the last of a thousand waits would be told noticeably later.
WAKES_PER_TURN = 256


class Parked:
    """One parked call: woken by `wake`, ended by `error`."""

    def __init__(self) -> None:
        self.wake = Wake()
        self.error: TurnoutError | None = None

    def check(self) -> None:
        """Raise what the call must end with, if it must."""
        if self.error is not None:
            raise self.error

    def end(self, error: TurnoutError) -> None:
        """End the call."""
        self.error = error
        self.wake.set()


def wake_in_turns(parked: Sequence[Parked], first: int = 0) -> None:
    """Wake many calls, some in this turn of the event loop and the others in the next ones.

    Each has work to do as it wakes, and what arrives meanwhile, for other runs too, would have to wait for all of it.
    """
    following = first + WAKES_PER_TURN
    for call in parked[first:following]:
        call.wake.set()
    if following < len(parked):
        asyncio.get_running_loop().call_soon(wake_in_turns, parked, following)


class ParkedWait(Parked):
    """A WaitForSampleable or Sample, and what it has to tell its caller."""

    def __init__(self, wait: Wait) -> None:
        super().__init__()
        self.wait = wait
        self.refills: deque[RefillClaim] = deque()
        self.ended: WaitEnd | None = None
        self.progress_due = False
        # What must be durable before the caller is told of the newest refill claim or of the end.
        self.decided: Durable | None = None

    async def durable(self) -> None:
        """Return once the caller may be told. Raises why what was decided is not stored."""
        if self.decided is not None:
            await self.decided


class ParkedWatch(Parked):
    """A WatchGroups; `progress` is the newest of each trajectory, not sent yet."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: dict[tuple[str, str, int | None], GroupEvent] = {}


class PartitionParking:
    """The calls parked on one partition."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.waits: dict[int, ParkedWait] = {}
        # Workers by arrival.
        self.claims: OrderedDict[int, Parked] = OrderedDict()
        self.depth_watches: set[Parked] = set()
        self.progress_timer: asyncio.TimerHandle | None = None
        # Whether a turn is coming that evicts more.
        self.going_on = False
        # What was gathered and told last: that a call was parked is no progress to the others.
        self.told: Counts | None = None

    def __iter__(self) -> Iterator[Parked]:
        yield from self.waits.values()
        yield from self.claims.values()
        yield from self.depth_watches


class RunParking:
    """The calls parked on one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.partitions = {name: PartitionParking(partition) for name, partition in run.partitions.items()}
        self.group_watches: set[ParkedWatch] = set()
        self._parked = 0
        self._next_claim = 1

    @property
    def parked(self) -> int:
        """Calls that are parked now."""
        return self._parked

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Room for one parked call. Raises RESOURCE_EXHAUSTED / CAP_PARKED_WAITS."""
        cap = self.run.state.config.caps.max_parked_waits
        if self._parked >= cap:
            message = f"{self._parked} calls are parked on the run, which is its cap"
            raise cap_reached(
                "max_parked_waits",
                "CAP_PARKED_WAITS",
                message,
                field="run_id",
                value=self.run.run_id,
                limit=cap,
                present=self._parked,
            )
        self._parked += 1
        try:
            yield
        finally:
            self._parked -= 1

    @contextmanager
    def claim(self, partition: Partition) -> Iterator[Parked]:
        """A parked ClaimGroups, last in the queue of its partition."""
        queue = self.partitions[partition.name].claims
        number = self._next_claim
        self._next_claim += 1
        with self.slot():
            parked = queue[number] = Parked()
            try:
                yield parked
            finally:
                queue.pop(number, None)

    @contextmanager
    def depth_watch(self, partition: Partition) -> Iterator[Parked]:
        """A parked WatchDepth."""
        watches = self.partitions[partition.name].depth_watches
        with self.slot():
            parked = Parked()
            watches.add(parked)
            try:
                yield parked
            finally:
                watches.discard(parked)

    @contextmanager
    def group_watch(self) -> Iterator[ParkedWatch]:
        """A parked WatchGroups."""
        with self.slot():
            parked = ParkedWatch()
            self.group_watches.add(parked)
            try:
                yield parked
            finally:
                self.group_watches.discard(parked)

    def end(self, error: TurnoutError) -> None:
        """End every call that is parked here."""
        for partition in self.partitions.values():
            if partition.progress_timer is not None:
                partition.progress_timer.cancel()
            for parked in partition:
                parked.end(error)
        for watch in self.group_watches:
            watch.end(error)
