"""The one thread that commits.

Invariants: parcels and jobs are done in the order in which they were handed in; all parcels that wait when a commit
begins, up to BATCH_BYTES, go into it as one batch; the event loop is woken once per commit; after the first failure
nothing more is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, Final, Protocol

from services.runtime.errors import TurnoutError
from services.runtime.journal.batch import BATCH_BYTES
from services.runtime.journal.durable import Parcel
from services.runtime.journal.failures import JournalFailure, failure_of

STOP: Final = None


class Job:
    """Something else for the thread to do between two commits."""

    __slots__ = ("done", "run")

    def __init__(self, run: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self.run = run
        self.done = done

    def succeed(self, result: object) -> None:
        """Hand over the result; on the event loop."""
        if not self.done.done():
            self.done.set_result(result)

    def fail(self, error: TurnoutError) -> None:
        """Hand over the failure; on the event loop."""
        if not self.done.done():
            self.done.set_exception(error)


class Owner(Protocol):
    """Whom the thread reports to, on the event loop."""

    def committed(self, parcels: list[Parcel], seconds: float) -> None:
        """These are durable, after a commit that took so long."""
        ...

    def broke(self, parcels: list[Parcel], job: Job | None, failure: JournalFailure) -> None:
        """These failed, and the thread has ended."""
        ...


class Writer:
    """Commits what is handed in. All methods are called on the event loop."""

    def __init__(
        self, commit: Callable[[int, bytes], None], owner: Owner, after_work: Callable[[], None], name: str
    ) -> None:
        """`commit(count, body)`, and `after_work()` after each commit or job, run on the thread."""
        self._commit = commit
        self._after_work = after_work
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._items: deque[Parcel | Job | None] = deque()
        self._given = threading.Condition()
        self._outstanding = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # A daemon, since a process that dies in the middle of a commit is what a journal is made for.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all that was handed in is done and told."""
        return not self._outstanding

    def hand_in(self, parcel: Parcel) -> None:
        """Commit `parcel` as soon as may be."""
        self._put(parcel)

    def call(self, run: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run something on the thread, after everything handed in so far. A failure there ends the thread."""
        job = Job(run, self._loop.create_future())
        self._put(job)
        return job.done

    def withdraw(self) -> list[Parcel | Job]:
        """Take back what the thread has not begun, and let it end."""
        with self._given:
            left = [item for item in self._items if item is not STOP]
            self._items.clear()
        self._put(STOP)
        return left

    async def stop(self) -> None:
        """Let the thread do all it was given, and wait for its end."""
        self._put(STOP)
        await asyncio.shield(self._ended)

    def _put(self, item: Parcel | Job | None) -> None:
        self._outstanding += 1
        with self._given:
            self._items.append(item)
            self._given.notify()

    def _take(self) -> list[Parcel] | Job | None:
        """Wait for something to do: parcels for one commit, a job, or STOP."""
        with self._given:
            while not self._items:
                self._given.wait()
            item = self._items.popleft()
            if not isinstance(item, Parcel):
                return item
            parcels, size = [item], item.size
            while size < BATCH_BYTES and self._items and isinstance(follower := self._items[0], Parcel):
                parcels.append(follower)
                size += follower.size
                self._items.popleft()
            return parcels

    def _run(self) -> None:
        try:
            while (item := self._take()) is not STOP:
                if not (self._do(item) if isinstance(item, Job) else self._store(item)):
                    return
        finally:
            self._tell(self._end)

    def _store(self, parcels: list[Parcel]) -> bool:
        try:
            body = b"".join(chain.from_iterable(parcel.parts for parcel in parcels))
            begun = time.perf_counter()
            self._commit(sum(parcel.count for parcel in parcels), body)
            seconds = time.perf_counter() - begun
        except Exception as error:
            self._tell(self._owner.broke, parcels, None, failure_of(error))
            return False
        self._tell(self._committed, parcels, seconds)
        self._after_work()
        return True

    def _committed(self, parcels: list[Parcel], seconds: float) -> None:
        self._outstanding -= len(parcels)
        self._owner.committed(parcels, seconds)

    def _do(self, job: Job) -> bool:
        try:
            result = job.run()
        except Exception as error:
            self._tell(self._owner.broke, [], job, failure_of(error))
            return False
        self._tell(self._done, job, result)
        self._after_work()
        return True

    def _done(self, job: Job, result: object) -> None:
        self._outstanding -= 1
        job.succeed(result)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop may have been closed without closing the journal: nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
