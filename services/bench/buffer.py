"""`turnout bench buffer`: what the replay buffer does in a second, beside a bare server.

    turnout bench buffer --json [--only NAME]... [--quick]

Invariants: every figure is measured on servers that were started for it and for those that need the same; both sides
take turns, so that a busy machine slows both. Figures with `fsync` in their meaning run at that durability, all others
at `os`. Where a bare server has nothing to compare with, the baseline is what the figure cannot go below: the bytes
of a trajectory on the wire, the start of a bare process, the same loop while it is idle, the same call at 64
groups. Two figures stand beside a peer, TransferQueue, where it is installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final

from services.bench.buffer_bytes import put_and_get
from services.bench.buffer_calls import QUICK, THOROUGH, depth_query, finish_stream, finish_unary, wake
from services.bench.buffer_large import LARGE, measure_large
from services.bench.buffer_transferqueue import FIGURES as TRANSFERQUEUE
from services.bench.buffer_transferqueue import beside_transferqueue
from services.bench.buffer_world import world
from services.bench.result import Result, Skipped
from services.runtime.journal import Durability

WAITERS: Final = {"wake_1": 1, "wake_64_last": 64, "wake_1000_last": 1000}

SINGLE: Final = ("depth_query", *WAITERS)
FSYNC: Final = ("finish_stream", "finish_unary", "payload_put_fsync")
PAYLOADS: Final = ("payload_put", "payload_get")
FIGURES: Final = (*SINGLE, *FSYNC, *PAYLOADS, *TRANSFERQUEUE, *LARGE)


async def measure(only: Collection[str] = (), *, quick: bool = False) -> AsyncIterator[Result | Skipped]:
    """Yield the figures named in `only`, or all, as they are there. Raises ValueError for a name that is none."""
    for name in only:
        if name not in FIGURES:
            raise ValueError(f"no figure {name!r}; there are: {', '.join(FIGURES)}")
    wanted = set(only or FIGURES)
    effort = QUICK if quick else THOROUGH
    with tempfile.TemporaryDirectory(prefix="turnout-bench-") as directory:
        place = Path(directory)
        if wanted & {*SINGLE, *PAYLOADS, *TRANSFERQUEUE}:
            async with world(_made(place / "os")) as servers:
                if "depth_query" in wanted:
                    yield await depth_query(servers, effort)
                for name, waiters in WAITERS.items():
                    if name in wanted:
                        yield await wake(servers, effort, name, min(waiters, 8) if quick else waiters)
                if wanted & set(PAYLOADS):
                    for result in await put_and_get(servers, effort, ("payload_put", "payload_get"), sync=False):
                        if result.name in wanted:
                            yield result
                if wanted & set(TRANSFERQUEUE):
                    async for figure in beside_transferqueue(servers, effort):
                        if figure.name in wanted:
                            yield figure
        if wanted & set(FSYNC):
            async with world(_made(place / "fsync"), Durability.FSYNC) as servers:
                if "finish_stream" in wanted:
                    yield await finish_stream(servers, effort)
                if "finish_unary" in wanted:
                    yield await finish_unary(servers, effort)
                if "payload_put_fsync" in wanted:
                    for result in await put_and_get(servers, effort, ("payload_put_fsync", None), sync=True):
                        yield result
        if wanted & set(LARGE):
            async for result in measure_large(_made(place / "large"), effort, wanted):
                yield result


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
