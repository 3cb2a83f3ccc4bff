"""The promise that a record is durable, and the parcel that many records share.

Invariants: the records handed in during one turn of the event loop form a parcel; a parcel is committed whole or not at
all, so its records share one fate, settled once; parcels settle in the order of their records. Nothing here is touched
by another thread while the loop may append to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from services.runtime.errors import TurnoutError


class Parcel:
    """Records that are committed together."""

    __slots__ = ("callbacks", "count", "error", "parts", "settled", "size", "waiters")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self.size = 0
        self.settled = False
        self.error: TurnoutError | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.callbacks: list[Callable[[], object]] = []

    def body(self) -> bytes:
        """The records as they stand in the body of a batch."""
        return b"".join(self.parts)

    def settle(self, error: TurnoutError | None = None) -> None:
        """Wake all who wait; once settled, a parcel stays as it is."""
        if self.settled:
            return
        self.settled = True
        self.error = error
        self.parts.clear()
        for callback in self.callbacks:
            callback()
        self.callbacks.clear()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    def wait(self) -> asyncio.Future[None]:
        """Return a future of the caller's own: cancelling it leaves the others alone."""
        waiter = asyncio.get_running_loop().create_future()
        if self.settled:
            waiter.set_result(None)
        else:
            self.waiters.append(waiter)
        return waiter


class Durable:
    """Resolved when a record, and every record before it, is durable. May be awaited any number of times, or never.

    Awaiting returns the record's position. It raises the TurnoutError that made the commit fail; whether the record is
    stored is then open until the journal has been opened again.
    """

    __slots__ = ("_parcel", "position")

    def __init__(self, position: int, parcel: Parcel) -> None:
        self.position = position
        self._parcel = parcel

    def done(self) -> bool:
        """Return whether the record is durable or has failed."""
        return self._parcel.settled

    def error(self) -> TurnoutError | None:
        """Return why the record failed; None while it is not done, or when it is durable."""
        error = self._parcel.error
        # One error is raised in many tasks, and each raise adds to the traceback of the object it raises.
        return None if error is None else TurnoutError(error.code, error.reason, error.message, error.metadata)

    def add_done_callback(self, callback: Callable[[Durable], object]) -> None:
        """Call `callback(self)` on the event loop, in the turn in which it is done: at once, if that is so already.

        Callbacks run in the order of their records, those of one parcel in the order in which they were added, and
        before anybody who awaits the same parcel. They must not raise.
        """
        if self._parcel.settled:
            callback(self)
        else:
            self._parcel.callbacks.append(partial(callback, self))

    def __await__(self) -> Generator[Any, None, int]:
        if not self._parcel.settled:
            yield from self._parcel.wait()
        error = self.error()
        if error is not None:
            raise error
        return self.position
