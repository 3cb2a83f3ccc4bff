"""Keeper: the life of what the scheduler stores, from the start of a process to its end.

Invariants: nothing is served before all that was stored is loaded; damage ends the process with an error and never with
an empty memory; after a failed commit memory is dropped and loaded again, after a failed sync the process exits. What
becomes of a run is taken down after each turn of the event loop in which something did, and before anyone is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from services.runtime.clock import ContinuedClock
from services.runtime.errors import TurnoutError, unavailable
from services.runtime.journal import Durability, Journal, JournalOptions, open_journal
from services.runtime.journal.compacting import compact_when_due
from services.runtime.journal.mending import Mending
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick
from services.scheduler.domain.config import PolicyFactory
from services.scheduler.hosted import HostedRun, Tools
from services.scheduler.registry import Registry
from services.scheduler.storage.book import Book
from services.scheduler.storage.loading import load
from services.scheduler.storage.restoring import restored
from services.scheduler.storage.schema import SCHEMA
from turnout.scheduler.storage.v1 import storage_pb2 as st


class Keeper:
    """Keeps the runs of one registry in one data directory."""

    def __init__(
        self,
        tools: Tools,
        registry: Registry,
        create: PolicyFactory,
        data_dir: Path,
        options: JournalOptions,
        set_serving: Callable[[bool], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._tools = tools
        self._registry = registry
        self._create = create
        self._dir = data_dir
        self._options = options
        self._set_serving = set_serving
        self._mending = Mending("scheduler", self._suspend, self._load, self._go_on, exit_process)
        self._log = get_logger("scheduler")
        self._journal: Journal | None = None
        self._loaded = False
        self._books: dict[str, Book] = {}
        self._due: dict[str, Book] = {}
        self.compaction_due = asyncio.Event()
        """Set when the journal has grown so long that a snapshot is worth its cost."""

    @property
    def journal(self) -> Journal | None:
        """The journal, once it is open; None with durability `none`."""
        return self._journal

    # --------------------------------------------------------------------------------------------------- keeping

    def follow(self, hosted: HostedRun) -> None:
        """Keep this run from now on, in place of the one of its id that was kept before."""
        run_id = hosted.run.run_id
        book = self._books.get(run_id)
        if book is not None and book.hosted.run is not hosted.run:
            # An opening that broke off half-way left it, and nobody has heard of it.
            self.forget(run_id)
            book = None
        if book is None:
            self._enter(Book(hosted, self._registry.checkpoints))
        else:
            book.hosted = hosted
        self._note(self._books[run_id])

    def _enter(self, book: Book) -> None:
        run = book.hosted.run
        self._books[run.run_id] = book
        run.log.listen(lambda: self._note(book))

    def _note(self, book: Book) -> None:
        """Something happened: take it down once this turn of the event loop is over."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._take_down)
        self._due[book.hosted.run.run_id] = book

    def _take_down(self) -> None:
        due, self._due = self._due, {}
        # Of a journal that failed, `watch` hears.
        with contextlib.suppress(TurnoutError):
            for run_id, book in due.items():
                if self._books.get(run_id) is book:
                    self._write(book)

    def _write(self, book: Book) -> None:
        journal = self._journal
        if journal is None or not self._loaded:
            return
        record = book.record()
        if record is not None:
            record.now = self._tools.clock.now()
            journal.append(book.hosted.run.run_id, record.SerializeToString())
            if journal.compaction_due:
                self.compaction_due.set()

    async def durable(self, hosted: HostedRun) -> None:
        """Return once everything that became of the run so far is durable. Raises why it is not."""
        book = self._books.get(hosted.run.run_id)
        if book is not None:
            self._due.pop(hosted.run.run_id, None)
            self._write(book)
        if self._journal is not None:
            await self._journal.tail()

    def forget(self, run_id: str) -> None:
        """A closed run is kept no longer."""
        self._books.pop(run_id, None)
        if self._journal is not None:
            self._journal.append(run_id, st.Record(now=self._tools.clock.now(), forgotten=True).SerializeToString())

    # --------------------------------------------------------------------------------------------------- loading

    async def open(self) -> None:
        """Load what is stored, and begin. Raises TurnoutError, OSError."""
        self._dir.mkdir(parents=True, exist_ok=True)
        journal = await open_journal(self._dir / "journal", schema=SCHEMA, options=self._options)
        if self._options.durability is Durability.NONE:
            await journal.close()
            return
        self._journal = journal
        if journal.lost:
            self._log.error("the machine stopped and cost answered calls", records=journal.lost)
        await self._load(journal)

    async def _load(self, journal: Journal) -> None:
        begun = time.perf_counter()
        loading = await load(journal, self._create, self._tools.settings.event_history)
        if not self._loaded or self._tools.clock.now() < loading.now:
            self._tools.clock = ContinuedClock(self._tools.clock, loading.now)
        self._loaded = True
        for loaded in loading.runs.values():
            for checkpoint_id, state in loaded.saved.items():
                self._registry.checkpoints.keep(loaded.run_id, checkpoint_id, state)
            hosted, opening, answer = restored(loaded, self._tools, self._registry.opener, self._create)
            self._enter(Book(hosted, self._registry.checkpoints, loaded.log.last, loaded.saved))
            self._registry.restore(hosted, opening, answer)
        seconds = round(time.perf_counter() - begun, 3)
        self._log.info("loaded", records=journal.position, runs=len(loading.runs), seconds=seconds)

    async def watch(self, tick: Tick) -> None:
        """Load again after a failed commit; never returns."""
        assert self._journal is not None
        await self._mending.watch(self._journal, tick)

    async def _suspend(self) -> None:
        self._set_serving(False)
        self._books.clear()
        await self._registry.suspend(unavailable("RELOADING", "what is stored is read again; the call may be repeated"))

    def _go_on(self) -> None:
        self._registry.go_on()
        self._set_serving(True)

    # ------------------------------------------------------------------------------------------------- snapshots

    async def compact(self, tick: Tick) -> None:
        """Take a snapshot whenever the log has grown long; never returns."""
        await compact_when_due(self.compaction_due, self.snapshot, self._log, tick, still=self._log_is_long)

    def _log_is_long(self) -> bool:
        return self._journal is None or self._journal.compaction_due

    async def snapshot(self) -> None:
        """Put a snapshot in place of the journal's records up to now."""
        journal = self._journal
        assert journal is not None
        # All of this in one turn: the image is that of this position.
        for book in self._books.values():
            self._write(book)
        if journal.position == journal.snapshot_position:
            return
        runs: list[tuple[st.Part, Iterator[st.Part]]] = []
        for book in self._books.values():
            parts = book.parts()
            runs.append((next(parts), parts))
        await journal.snapshot(journal.position, _chunks(self._tools.clock.now(), runs))

    async def close(self) -> None:
        """Make everything durable and let go of the files."""
        if self._journal is not None:
            with contextlib.suppress(TurnoutError):
                for book in self._books.values():
                    self._write(book)
            await self._journal.close()


async def _chunks(now: float, runs: list[tuple[st.Part, Iterator[st.Part]]]) -> AsyncIterator[bytes]:
    yield st.Part(now=now).SerializeToString()
    for first, others in runs:
        yield first.SerializeToString()
        for part in others:
            yield part.SerializeToString()
            # Others have their turn: the events of a long run take seconds.
            await asyncio.sleep(0)
