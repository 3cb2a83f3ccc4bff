"""Keeper: the journal of a controller, from the start of a process to its end.

Invariants: damage ends the process with an error and never with an empty memory; after a failed commit the journal is
opened again and everything is written anew, since the engines have gone on and only memory knows them; after a failed
sync the process exits. A snapshot is taken while calls are served.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from services.engine.book import Book
from services.engine.storage.past import Past, read_past
from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Durability, Journal, JournalOptions, JournalState, open_journal
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick
from turnout.engine.storage.v1 import storage_pb2 as st

SCHEMA: Final = "engine/1"
EXIT_FAILED: Final = 1

RETRY_S: Final = 1.0
"""Wall seconds between two attempts to write again, for example while the disk is full."""

CHUNK_BYTES: Final = 1 << 20
"""About the size of one part of a snapshot; between two of them the event loop goes on."""

_LOG = get_logger("engine")


class Keeper:
    """Keeps one controller in one data directory."""

    def __init__(
        self,
        book: Book,
        data_dir: Path,
        options: JournalOptions,
        suspend: Callable[[bool], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`suspend` is told when nothing can be stored (True), and when it can be again."""
        self._book = book
        self._dir = data_dir
        self._options = options
        self._suspend = suspend
        self._exit = exit_process
        self._journal: Journal | None = None

    async def open(self) -> Past:
        """Open the journal and read what is there. Raises TurnoutError, OSError."""
        self._dir.mkdir(parents=True, exist_ok=True)
        self._journal = await open_journal(self._dir / "journal", schema=SCHEMA, options=self._options)
        if self._journal.lost:
            _LOG.error("the machine stopped and cost answered calls", records=self._journal.lost)
        past = await read_past(self._journal)
        if self.keeps:
            self._book.begin(self._journal, past.replicas.values())
        return past

    @property
    def journal(self) -> Journal | None:
        """The journal, once it is open."""
        return self._journal

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._options.durability is not Durability.NONE

    async def watch(self, tick: Tick) -> None:
        """Write everything again after a failed commit; never returns."""
        journal = self._journal
        assert journal is not None
        while True:
            tick()
            failure = await journal.failed()
            self._suspend(True)
            if failure.fatal:
                self._fatal("the disk cannot be trusted; this process ends", failure.error)
            _LOG.error("a commit failed; writing everything again", error=str(failure.error))
            while not await self._write_again(journal):  # noqa: ASYNC110 - the disk tells nobody when it has room
                await asyncio.sleep(RETRY_S)
            self._suspend(False)

    async def _write_again(self, journal: Journal) -> bool:
        try:
            if journal.state is JournalState.FAILED:
                await journal.reopen()
            self._book.write_again()
            await journal.tail()
        except (TurnoutError, OSError) as error:
            lost = isinstance(error, TurnoutError) and error.code is Code.DATA_LOSS
            if journal.state is JournalState.FATAL or lost:
                self._fatal("what is stored cannot be read; this process ends", error)
            _LOG.error("could not write again yet", error=str(error))
            return False
        return True

    def _fatal(self, what: str, error: Exception) -> None:
        _LOG.critical(what, error=str(error))
        self._exit(EXIT_FAILED)

    async def compact(self, tick: Tick) -> None:
        """Take a snapshot whenever the log has grown long; never returns."""
        while True:
            await self._book.compaction_due.wait()
            self._book.compaction_due.clear()
            begun = time.perf_counter()
            try:
                await self.snapshot()
            except TurnoutError as error:
                _LOG.error("could not take a snapshot", error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                _LOG.info("took a snapshot", seconds=round(time.perf_counter() - begun, 3))
            tick()

    async def snapshot(self) -> None:
        """Put a snapshot in place of the journal's records up to now."""
        journal = self._journal
        assert journal is not None
        if journal.position > journal.snapshot_position:
            await journal.snapshot(journal.position, self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        part, size = st.Records(), 0
        for record in self._book.records():
            part.records.append(record)
            size += record.ByteSize()
            if size >= CHUNK_BYTES:
                yield part.SerializeToString()
                await asyncio.sleep(0)
                part, size = st.Records(), 0
        yield part.SerializeToString()

    async def close(self) -> None:
        """Make everything durable and let go of the files."""
        if self._journal is not None:
            await self._journal.close()
