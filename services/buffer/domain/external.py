"""ExternalBook: payloads in stores that are not the buffer's, and what their owners may delete.

Invariants: a payload is let go once, when neither the run nor a checkpoint names it any more, and is told to the owner
of its store until that acknowledges it; while it is named it has one size and CRC; what was let go is not named again
before it was acknowledged. The book outlives its run, since checkpoints and owners do.

A checkpoint holds every payload that was named when it began. Holds are numbered from 1, and a payload that was named
after `since` holds and let go after `until` is held by those whose number is above `since` and at most `until`.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.buffer.domain.outputs import Payload
from services.runtime.errors import failed_precondition, invalid_argument

# Kept for owners that do not call: some 200 MB. A run that nobody watches must not eat the memory of the others.
MAX_RELEASED = 1_000_000

Key = tuple[str, str]
"""Store and id."""


@dataclass(slots=True, eq=False)
class Named:
    """A payload that is named by `books` (two while a restore is under way)."""

    payload: Payload
    since: int
    books: int = 1


@dataclass(slots=True, eq=False)
class Held:
    """A payload that only checkpoints hold."""

    payload: Payload
    since: int
    until: int


class ExternalBook:
    """The external payloads of one run id."""

    __slots__ = (
        "_held",
        "_limit",
        "_named",
        "_numbers",
        "_order",
        "_queue",
        "_since",
        "given_up",
        "holds",
        "holds_made",
        "listeners",
    )

    def __init__(self, limit: int = MAX_RELEASED) -> None:
        """`limit`: how many unacknowledged releases are kept."""
        self._limit = limit
        self._named: dict[Key, Named] = {}
        self._held: dict[Key, Held] = {}
        # Let go, in order; the numbers are only for readers of this process.
        self._queue: dict[Key, tuple[int, Payload]] = {}
        self._order: OrderedDict[int, Key] = OrderedDict()
        self._numbers = 0
        self._since: dict[Key, int] = {}
        self.given_up = 0
        self.holds: dict[str, int] = {}
        self.holds_made = 0
        self.listeners: set[Callable[[], None]] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing can be let go any more, and nothing waits for its owner."""
        return not (self._named or self._held or self._queue)

    @property
    def unused(self) -> bool:
        """Whether it is as when it was made."""
        return self.empty and not self.holds_made and not self.given_up

    @property
    def let_go_ever(self) -> int:
        """How many payloads this process saw let go."""
        return self._numbers

    @property
    def named(self) -> Mapping[Key, Named]:
        """What is named."""
        return self._named

    @property
    def held(self) -> Mapping[Key, Held]:
        """What only checkpoints hold."""
        return self._held

    @property
    def waiting_count(self) -> int:
        """How many payloads wait for their owner."""
        return len(self._queue)

    # ---------------------------------------------------------------------------------------------------------- naming

    def check(self, field: str, payload: Payload) -> None:
        """Raise INVALID_ARGUMENT / PAYLOAD_MISMATCH or FAILED_PRECONDITION / PAYLOAD_RELEASED if it cannot be named."""
        key = (payload.store, payload.id)
        if key in self._queue:
            message = "the payload was let go, and may be deleted at any time; a new one needs an id of its own"
            raise failed_precondition("PAYLOAD_RELEASED", message, field=f"{field}.ref.id", value=payload.id)
        there = self._named.get(key) or self._held.get(key)
        if there is not None and (there.payload.size, there.payload.crc32c) != (payload.size, payload.crc32c):
            known = there.payload
            message = f"the run names it with {known.size} bytes and CRC32C {known.crc32c:#010x}"
            raise invalid_argument(f"{field}.ref", message, value=payload.id, reason="PAYLOAD_MISMATCH")

    def name(self, payload: Payload) -> None:
        """One more book names a payload."""
        key = (payload.store, payload.id)
        there = self._named.get(key)
        if there is not None:
            there.books += 1
            return
        held = self._held.pop(key, None)
        queued = self._queue.pop(key, None)
        if queued is not None:  # Only a restore does this.
            del self._order[queued[0]]
        since = self._since.pop(key, self.holds_made) if held is None else held.since
        self._named[key] = Named(payload, since)

    def drop(self, keys: Iterable[Key]) -> None:
        """One book less names these payloads."""
        newest = next(reversed(self.holds.values())) if self.holds else 0
        before = self._numbers
        for key in keys:
            there = self._named[key]
            there.books -= 1
            if there.books:
                continue
            del self._named[key]
            if there.since < newest:
                self._held[key] = Held(there.payload, there.since, self.holds_made)
            else:
                self._release(key, there.payload)
        if self._numbers != before:
            self.wake()

    def refuse(self, payload: Payload) -> None:
        """A payload was handed in with a result that is not wanted any more; unless it is known, it may go."""
        key = (payload.store, payload.id)
        if key not in self._named and key not in self._held and key not in self._queue:
            self._release(key, payload)
            self.wake()

    def _release(self, key: Key, payload: Payload) -> None:
        number = self._numbers = self._numbers + 1
        self._queue[key] = (number, payload)
        self._order[number] = key
        if number > self._limit and len(self._queue) > self._limit:
            _, oldest = self._order.popitem(last=False)
            del self._queue[oldest]
            self.given_up += 1

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def hold(self, checkpoint_id: str) -> None:
        """A checkpoint begins."""
        self.holds_made += 1
        self.holds.pop(checkpoint_id, None)
        self.holds[checkpoint_id] = self.holds_made

    def unhold(self, checkpoint_id: str) -> None:
        """A checkpoint is gone, or did not come about."""
        del self.holds[checkpoint_id]
        numbers = list(self.holds.values())
        for key, held in list(self._held.items()):
            # The newest hold that is not younger than its end, if it is not older than its beginning.
            place = bisect_right(numbers, held.until)
            if not place or numbers[place - 1] <= held.since:
                del self._held[key]
                self._release(key, held.payload)
        self.wake()

    # ---------------------------------------------------------------------------------------------------------- owners

    def waiting(self, store: str, after: int, limit: int) -> tuple[list[Payload], int]:
        """Up to `limit` payloads of a store that were let go behind the number `after`, and the number to go on from.

        Numbers begin at 1 and mean nothing to another process.
        """
        found: list[Payload] = []
        for number, key in self._behind(after):
            after = number
            if key[0] == store:
                found.append(self._queue[key][1])
                if len(found) == limit:
                    break
        return found, after

    def _behind(self, after: int) -> Iterator[tuple[int, Key]]:
        if after >= self._numbers:
            return
        if self._numbers - after < len(self._order):
            # Few are new: their numbers are looked up instead of passing over all the others.
            for number in range(after + 1, self._numbers + 1):
                key = self._order.get(number)
                if key is not None:
                    yield number, key
            return
        for number, key in self._order.items():
            if number > after:
                yield number, key

    def acknowledge(self, store: str, ids: Iterable[str]) -> list[str]:
        """The owner of a store deleted these; returns those that were still told of."""
        known = [payload_id for payload_id in dict.fromkeys(ids) if (store, payload_id) in self._queue]
        for payload_id in known:
            number, _ = self._queue.pop((store, payload_id))
            del self._order[number]
        if known:
            # What waits for the end of the book may have seen it.
            self.wake()
        return known

    def wake(self) -> None:
        """Tell those who follow that there is news."""
        for listener in self.listeners:
            listener()

    # --------------------------------------------------------------------------------------------------------- storing

    def released(self) -> list[Payload]:
        """What waits for its owner, oldest first."""
        return [payload for _, payload in self._queue.values()]

    def restore_named(self, payload: Payload, since: int) -> None:
        """A payload that will be named soon had been named after `since` holds."""
        self._since[payload.store, payload.id] = since

    def restore_held(self, payload: Payload, since: int, until: int) -> None:
        """Only checkpoints hold a payload."""
        self._held[payload.store, payload.id] = Held(payload, since, until)

    def restore_released(self, payload: Payload) -> None:
        """A payload waits for its owner."""
        self._release((payload.store, payload.id), payload)


class Externals:
    """The books of all run ids."""

    def __init__(self) -> None:
        self._books: dict[str, ExternalBook] = {}

    def __iter__(self) -> Iterator[tuple[str, ExternalBook]]:
        return iter(self._books.items())

    def get(self, run_id: str) -> ExternalBook | None:
        """The book of a run that is or was there, if it has one."""
        return self._books.get(run_id)

    def of(self, run_id: str) -> ExternalBook:
        """The book of a run, a new one if there is none."""
        return self._books.setdefault(run_id, ExternalBook())

    def discard_empty(self, run_id: str) -> None:
        """The run is gone; its book goes with it if nothing can come of it any more."""
        book = self._books.get(run_id)
        if book is not None and book.empty:
            del self._books[run_id]
            book.wake()
