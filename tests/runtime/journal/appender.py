"""A process that appends until it is killed: `python appender.py DIRECTORY LEVEL COMPACTING`.

Prints each payload once its record is durable. With COMPACTING = 1 it takes snapshots meanwhile, whose chunks are all
payloads so far, at most `PAUSE_EVERY` per turn, and holds few bytes per checkpoint, so that everything happens often.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from services.runtime.journal import Durability, Journal, JournalOptions, open_journal

CALLERS = 8
PAUSE_EVERY = 50


async def _caller(journal: Journal, applied: list[bytes], number: int) -> None:
    count = 0
    while True:
        payload = f"{number}:{count}".encode()
        applied.append(payload)
        await journal.append("s", payload)
        os.write(1, payload + b"\n")
        count += 1


async def _chunks(applied: list[bytes]) -> AsyncIterator[bytes]:
    for index, payload in enumerate(applied):
        yield payload
        if index % PAUSE_EVERY == 0:
            await asyncio.sleep(0)


async def _compact(journal: Journal, applied: list[bytes]) -> None:
    while True:
        if journal.position > journal.snapshot_position:
            await journal.snapshot(journal.position, _chunks(list(applied)))
        await asyncio.sleep(0.005)


async def main(directory: str, level: str, compacting: str) -> None:
    """Append for ever."""
    options = JournalOptions(durability=Durability(level), ballast_bytes=0, checkpoint_bytes=1 << 16)
    journal = await open_journal(Path(directory), schema="test/1", options=options)
    applied: list[bytes] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(CALLERS):
            tasks.create_task(_caller(journal, applied, number))
        if compacting == "1":
            tasks.create_task(_compact(journal, applied))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
