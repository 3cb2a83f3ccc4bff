"""Keeper: the journal of a controller, from the start of a process to its end.

Invariants: damage ends the process with an error and never with an empty memory; after a failed commit the journal is
opened again and everything is written anew, since the engines have gone on and only memory knows them; after a failed
sync the process exits. A snapshot is taken while calls are served.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from services.engine.book import Book
from services.engine.storage.past import Past, read_past
from services.engine.storage.schema import SCHEMA
from services.runtime.journal import Durability, Journal, JournalOptions, open_journal
from services.runtime.journal.compacting import compact_when_due
from services.runtime.journal.mending import Mending
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick
from turnout.engine.storage.v1 import storage_pb2 as st

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
        self._mending = Mending("engine", self._stop_serving, self._write_again, lambda: suspend(False), exit_process)
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
        assert self._journal is not None
        await self._mending.watch(self._journal, tick)

    async def _stop_serving(self) -> None:
        self._suspend(True)

    async def _write_again(self, journal: Journal) -> None:
        self._book.write_again()
        await journal.tail()

    async def compact(self, tick: Tick) -> None:
        """Take a snapshot whenever the log has grown long; never returns."""
        await compact_when_due(self._book.compaction_due, self.snapshot, _LOG, tick, still=self._log_is_long)

    def _log_is_long(self) -> bool:
        return self._journal is None or self._journal.compaction_due

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
