"""Snapshots and the log on their way between the event loop and the threads that read and write them.

Invariants: chunks and records go in lots, since owners like small ones and each hand-over costs; nothing here waits for
a disk on the loop. What was read while the journal was opened anew is refused: it may be of files that are gone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from functools import partial
from typing import Final

from services.runtime.journal.batch import Batch, Chain
from services.runtime.journal.database import Database
from services.runtime.journal.failures import damaged, failure_of, is_damage, reopened
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.snapshot import SnapshotReader, SnapshotWriter
from services.runtime.journal.threads import Threads

LOT_BYTES: Final = 1 << 20
"""Of the chunks of a snapshot."""


async def read_chunks(threads: Threads, reader: SnapshotReader) -> AsyncGenerator[bytes, None]:
    """The chunks of a snapshot; the reader is closed in the end."""
    try:
        while chunks := await threads.read(lambda: reader.take(LOT_BYTES)):
            for chunk in chunks:
                yield chunk
    finally:
        reader.close()


async def write_chunks(threads: Threads, writer: SnapshotWriter, chunks: AsyncIterable[bytes]) -> int:
    """Write a snapshot; its checksum. It counts for nothing until the database names it."""
    lot: list[bytes] = []
    size = 0
    async for chunk in chunks:
        lot.append(chunk)
        size += len(chunk)
        if size >= LOT_BYTES:
            await threads.aside(partial(writer.write, lot))
            lot, size = [], 0
    await threads.aside(partial(writer.write, lot))
    return await threads.aside(writer.finish)


async def read_batches(
    threads: Threads, database: Database, files: JournalFiles, after: int, until: int, is_open: Callable[[], bool]
) -> AsyncGenerator[list[Batch], None]:
    """The batches with the records behind `after` up to `until`, in lots. `is_open`: whether that database still is.

    The first and the last may have others too. Raises OUT_OF_RANGE if they are not there any more, DATA_LOSS.
    """
    database.require_present(after)
    chain = Chain(after + 1)
    while chain.next_position <= until:
        try:
            batches = await threads.read(lambda: database.read_slice(chain, until))
        except sqlite3.ProgrammingError:
            raise reopened() from None  # The connection was closed under the reader.
        except sqlite3.Error as error:
            if is_damage(error):
                last_good = chain.next_position - 1
                raise damaged(files.database.name, str(error), last_good=last_good) from error
            raise failure_of(error).error from error
        if not is_open():
            raise reopened()
        yield batches
