"""Uploads payloads until it is killed, and prints the id and CRC32C of each once it is acknowledged."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from google_crc32c import value

from services.buffer.segments import SegmentStore
from tests.buffer.segments.helpers import KIB, data_of, no_fatal, nothing_to_wait_for, small


async def main(directory: Path) -> None:
    """Upload from four tasks at once."""
    options = small(segment_bytes=1024 * KIB)
    store = await SegmentStore.open(directory, options, settled=nothing_to_wait_for, on_fatal=no_fatal)
    store.retain([])

    async def run(lane: int) -> None:
        for number in range(10_000):
            name = f"u-{os.getpid()}-{lane}-{number}"
            data = data_of(number, 300 * KIB)
            upload = store.upload(name)
            for at in range(0, len(data), 64 * KIB):
                await upload.write(data[at : at + 64 * KIB])
            await upload.finish()
            print(name, value(data), flush=True)

    await asyncio.gather(*map(run, range(4)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
