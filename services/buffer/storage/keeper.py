"""Keeper: the life of what is stored, from the start of a process to its end.

Invariants: nothing is served before all that was stored is loaded and verified; damage ends the process with an error
and never with an empty memory; after a failed commit memory is dropped and loaded again, after a failed sync the
process exits. A snapshot is taken while calls are served, in slices so short that the event loop is never held up.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from services.buffer.desk import Desk
from services.buffer.memory import Memory
from services.buffer.segments import SegmentOptions, SegmentStore
from services.buffer.storage.checkpoints import Checkpoints
from services.buffer.storage.externals import ExternalsImaging
from services.buffer.storage.imaging import RunImaging, answers_part
from services.buffer.storage.loading import load
from services.buffer.storage.pauses import Pauses
from services.buffer.storage.schema import SCHEMA
from services.runtime.collector import no_collections
from services.runtime.errors import TurnoutError, describe, unavailable
from services.runtime.idempotency import Answer
from services.runtime.journal import Durability, Journal, JournalOptions, JournalState, open_journal
from services.runtime.journal.compacting import compact_when_due
from services.runtime.journal.failures import damaged
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.mending import RETRY_S, Mending
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick
from turnout.buffer.storage.v1 import storage_pb2 as st


class Keeper:
    """Keeps one desk in one data directory."""

    def __init__(
        self,
        desk: Desk,
        data_dir: Path,
        journal: JournalOptions,
        segments: SegmentOptions,
        set_serving: Callable[[bool], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._desk = desk
        self._dir = data_dir
        self._journal_options = journal
        self._segment_options = segments
        self._set_serving = set_serving
        self._mending = Mending("buffer", self._suspend, self._load, lambda: set_serving(True), exit_process)
        self._log = get_logger("buffer")
        self._journal: Journal | None = None
        self._store: SegmentStore | None = None
        self.checkpoints = Checkpoints(data_dir / "checkpoints")

    async def open(self) -> None:
        """Load what is stored, and begin. Raises DATA_LOSS / JOURNAL_DAMAGED and other TurnoutErrors, OSError."""
        self._dir.mkdir(parents=True, exist_ok=True)
        journal, payloads = self._dir / "journal", self._dir / "payloads"
        if payloads.exists() and not JournalFiles(journal).begun():
            # The first start makes the journal first. A new one would name no payload, so all of them would go.
            raise damaged(journal.name, f"it is gone, but {payloads} is there", last_good=0)
        await self.checkpoints.sweep()
        self._journal = await open_journal(journal, schema=SCHEMA, options=self._journal_options)
        if self._journal_options.durability is Durability.NONE:
            return
        if self._journal.lost:
            self._log.error("the machine stopped and cost answered calls", records=self._journal.lost)
        await self._load(self._journal)

    async def _load(self, journal: Journal) -> None:
        begun = time.perf_counter()
        if self._store is not None:
            await self._store.close()
        self._store = await SegmentStore.open(
            self._dir / "payloads", self._segment_options, settled=self._desk.durable, on_fatal=self._mending.end
        )
        self._desk.store = self._store
        with no_collections():
            memory = await load(journal, self._store)
        lost = self._store.retain(payload_id for run in memory.runs for payload_id in run.state.payloads.ids())
        for payload_id in lost:
            self._log.error("the bytes of a payload are lost", payload_id=payload_id)
        self._desk.begin(memory, journal)
        await self._let_holds_go(memory)
        await self._desk.durable()
        seconds = round(time.perf_counter() - begun, 3)
        groups = sum(run.state.groups for run in memory.runs)
        self._log.info("loaded", records=journal.position, groups=groups, seconds=seconds)

    async def _let_holds_go(self, memory: Memory) -> None:
        """End the holds of checkpoints that a crash left unfinished, or half deleted."""
        for run_id, book in list(memory.externals):
            for checkpoint_id in list(book.holds):
                try:
                    found = await self.checkpoints.find(run_id, checkpoint_id)
                except TurnoutError as error:
                    self._log.error("a checkpoint cannot be read", checkpoint_id=checkpoint_id, error=str(error))
                    continue
                if found is None:
                    self._desk.unhold(run_id, checkpoint_id)

    async def watch(self, tick: Tick) -> None:
        """Load again after a failed commit; never returns."""
        assert self._journal is not None
        await self._mending.watch(self._journal, tick)

    async def _suspend(self) -> None:
        self._set_serving(False)
        self._desk.suspend(unavailable("RELOADING", "what is stored is read again; the call may be repeated"))

    async def reserve(self, tick: Tick) -> None:
        """Take the journal's reserve back once the disk has room again, and so accept what needs space; never returns.

        The disk tells nobody, so whoever was refused is the sign to look.
        """
        desk, journal = self._desk, self._journal
        assert journal is not None
        while True:
            await desk.space_wanted.wait()
            desk.space_wanted.clear()
            tick()
            if journal.state is JournalState.OPEN and journal.short_of_space:
                try:
                    if await journal.take_ballast():
                        self._log.info("the disk has room again")
                        continue
                except OSError as error:
                    self._log.error("the reserve cannot be taken", detail=describe(error))
            await asyncio.sleep(RETRY_S)

    # -------------------------------------------------------------------------------------------------------- snapshots

    async def compact(self, tick: Tick) -> None:
        """Take a snapshot whenever the log has grown long; never returns."""
        await compact_when_due(self._desk.compaction_due, self.snapshot, self._log, tick, still=self._log_is_long)

    def _log_is_long(self) -> bool:
        return self._journal is None or self._journal.compaction_due

    async def snapshot(self) -> None:
        """Put a snapshot in place of the journal's records up to now."""
        journal = self._journal
        assert journal is not None
        if journal.position == journal.snapshot_position:
            return
        async with self._desk.restoring:
            # All of this in one turn: the image is that of this position.
            position, memory = journal.position, self._desk.memory
            begin = st.Part(begin=st.Begin(now=self._desk.clock.now(), created=memory.created))
            externals = [ExternalsImaging(run_id, book) for run_id, book in memory.externals if not book.unused]
            orphans = [(call, answers.kept("")) for call, answers in memory.answers.items()]
            imagings = [
                RunImaging(run, {call: answers.kept(run.run_id) for call, answers in memory.answers.items()})
                for run in memory.runs
            ]
        try:
            await journal.snapshot(position, self._chunks(begin, externals, imagings, orphans))
        finally:
            for imaging in imagings:
                imaging.close()

    async def _chunks(
        self,
        begin: st.Part,
        externals: list[ExternalsImaging],
        imagings: list[RunImaging],
        orphans: list[tuple[str, list[tuple[str, Answer]]]],
    ) -> AsyncIterator[bytes]:
        """The parts of a snapshot; `orphans` are answers that outlive their run."""
        pauses = Pauses()
        yield begin.SerializeToString()
        for book in externals:
            for part in book.parts():
                yield part.SerializeToString()
                await pauses.breathe()
        for imaging in imagings:
            for payloads, part in imaging.parts():
                imaging.release(payloads)
                yield part.SerializeToString()
                await pauses.breathe()
        for call, kept in orphans:
            yield answers_part("", call, kept).SerializeToString()
        # The records that brought the bytes are given up for this snapshot.
        await self._desk.store.flush()

    async def close(self) -> None:
        """Make everything durable and let go of the files."""
        if self._journal is not None:
            await self._journal.close()
        if self._store is not None:
            await self._store.close()
