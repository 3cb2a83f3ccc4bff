"""How fast the journal stores records, beside a bare file and bare SQLite.

    python -P -m services.bench.journal [--directory DIRECTORY] [--seconds 0.2] [--rounds 3]

Invariants: each caller awaits a record before it makes the next; journal and baselines take turns in short slots on the
same disk, so that a slow moment hits all of them; a value is the median of its rounds. The bare file gets the records
of all callers at once, bare SQLite one after the other. Latencies are those of one record, from handing it in to going
on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Protocol

import uvloop

from services.bench.journal_bare import BareFile, BareSqlite
from services.bench.result import Result
from services.runtime.journal import Durability, Journal, JournalOptions, open_journal

CALLERS: Final = (1, 64)

RECORD: Final = bytes(300)
"""About what the record of a finished trajectory needs."""

_TICK_S: Final = 0.001
"""Period of the watchdog: well below the 2 ms that nothing may hold the loop."""


class _Bare(Protocol):
    @property
    def groups(self) -> bool: ...
    def store(self, records: list[bytes]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Figures:
    """One value per round."""

    rate: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)

    def add(self, latencies: list[float], seconds: float) -> None:
        """Take the latencies in seconds of the records of one slot."""
        ordered = sorted(latencies)
        self.rate.append(len(ordered) / seconds)
        self.p50_ms.append(1e3 * ordered[len(ordered) // 2])
        self.p99_ms.append(1e3 * ordered[math.ceil(0.99 * len(ordered)) - 1])


async def measure(directory: Path, seconds: float, rounds: int) -> list[Result]:
    """Measure in a fresh directory within `directory`, `rounds` slots of `seconds` for each figure."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="turnout-bench-") as place:
        results: list[Result] = []
        for level in Durability:
            results += await _measure_level(Path(place), level, seconds, rounds)
        return results


async def _measure_level(place: Path, level: Durability, seconds: float, rounds: int) -> list[Result]:
    sync = level is Durability.FSYNC
    journal = await open_journal(place / level, schema="bench/1", options=JournalOptions(durability=level))
    # Without durability there is nothing bare to store in: the baseline is the call that stores nothing.
    bare: dict[str, _Bare] = {"nothing": _Nothing()}
    if level is not Durability.NONE:
        bare = {
            "file": BareFile(place / f"{level}.log", sync=sync),
            "sqlite": BareSqlite(place / f"{level}.db", sync=sync),
        }
    results: list[Result] = []
    try:
        for callers in CALLERS:
            ours, theirs = _Figures(), {name: _Figures() for name in bare}
            for _ in range(rounds):
                ours.add(*await _append(journal, callers, seconds))
                for name, store in bare.items():
                    theirs[name].add(*_store(store, callers, seconds))
            results += _results(f"journal_{level}_{callers}", ours, theirs)
        if level is not Durability.NONE:
            results.append(await _loop_block(journal, level, seconds, rounds))
    finally:
        await journal.close()
        for store in bare.values():
            store.close()
    return results


def _results(prefix: str, ours: _Figures, theirs: dict[str, _Figures]) -> list[Result]:
    results = []
    for name, figures in theirs.items():
        results.append(Result(f"{prefix}_appends_over_{name}", "1/s", median(ours.rate), median(figures.rate)))
        if name != "sqlite":
            results.append(Result(f"{prefix}_p50_over_{name}", "ms", median(ours.p50_ms), median(figures.p50_ms)))
            results.append(Result(f"{prefix}_p99_over_{name}", "ms", median(ours.p99_ms), median(figures.p99_ms)))
    return results


async def _append(journal: Journal, callers: int, seconds: float) -> tuple[list[float], float]:
    latencies: list[float] = []
    begin = time.perf_counter()
    end = begin + seconds

    async def caller() -> None:
        now = 0.0
        while now < end:
            start = time.perf_counter()
            await journal.append("bench", RECORD)
            now = time.perf_counter()
            latencies.append(now - start)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return latencies, time.perf_counter() - begin


def _store(bare: _Bare, callers: int, seconds: float) -> tuple[list[float], float]:
    latencies: list[float] = []
    records = [RECORD] * (callers if bare.groups else 1)
    begin = time.perf_counter()
    now = 0.0
    while now < begin + seconds:
        start = time.perf_counter()
        bare.store(records)
        now = time.perf_counter()
        latencies += [now - start] * len(records)
    return latencies, now - begin


async def _loop_block(journal: Journal, level: Durability, seconds: float, rounds: int) -> Result:
    """Return the longest time that the loop was held while all callers append, beside as many that only take turns.

    An idle loop would be the wrong baseline: a busy one is also held up by what else runs on the machine.
    """
    block, busy = [], []
    for _ in range(rounds):
        busy.append(await _longest_pause(_take_turns(max(CALLERS), seconds)))
        block.append(await _longest_pause(_append(journal, max(CALLERS), seconds)))
    return Result(f"journal_{level}_loop_block_max", "ms", 1e3 * median(block), 1e3 * median(busy))


async def _take_turns(callers: int, seconds: float) -> None:
    end = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < end:  # noqa: ASYNC110 - taking turns is all it is for
            await asyncio.sleep(0)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def _longest_pause(work: Awaitable[object]) -> float:
    """Return by how many seconds a timer of 1 ms was late at worst while `work` ran."""
    loop = asyncio.get_running_loop()
    worst = 0.0
    timer: asyncio.Handle | None = None

    def tick(due: float) -> None:
        nonlocal worst, timer
        now = time.perf_counter()
        worst = max(worst, now - due)
        timer = loop.call_later(_TICK_S, tick, now + _TICK_S)

    tick(time.perf_counter())
    await work
    if timer is not None:
        timer.cancel()
    return worst


class _Nothing:
    groups = False

    def store(self, records: list[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    """Print one JSON object per result."""
    parser = argparse.ArgumentParser(description="Measure the journal on the disk of a directory.")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a slot")
    parser.add_argument("--rounds", type=int, default=3, help="slots per figure")
    chosen = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for result in runner.run(measure(chosen.directory, chosen.seconds, chosen.rounds)):
            print(result.to_line())


if __name__ == "__main__":
    main()
