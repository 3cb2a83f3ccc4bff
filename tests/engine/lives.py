"""Engines that outlive their controllers, and controllers that die at a given moment.

A controller "dies" where it stands: what it was about to do is never done, what nobody has waited for is not stored,
and nothing that it still holds can reach an engine any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from services.engine.backends.base import Backend
from services.engine.book import STREAM
from services.engine.domain.engine_state import EngineState
from services.engine.domain.spec import ReplicaSpec
from services.engine.reference.engine import EngineConfig, ReferenceEngine
from services.engine.storage.schema import SCHEMA
from services.runtime.clock import MonotonicClock
from services.runtime.errors import unavailable
from services.runtime.journal import Journal, JournalState, open_journal
from tests.engine.helpers import Engine, running
from tests.engine.recorder import Recorder


class Points:
    """The moments at which a controller can die: before and after each command and each wait for the disk."""

    def __init__(self, at: int = 0) -> None:
        """It dies at the `at`-th one; 0 is never."""
        self.names: list[str] = []
        self.reached = asyncio.Event()
        self._at = at

    async def passing(self, name: str) -> None:
        """One of them."""
        if not self.reached.is_set():
            self.names.append(name)
            if len(self.names) == self._at:
                self.reached.set()
        if self.reached.is_set():
            await asyncio.Event().wait()


class _Seen(Recorder):
    """One controller's hold on an engine."""

    def __init__(
        self, engine: ReferenceEngine, journal: list[tuple[str, str]], spec: ReplicaSpec, points: Points, mute: bool
    ) -> None:
        super().__init__(engine, journal, spec.replica_id)
        self._points = points
        self._mute = mute

    async def probe(self) -> EngineState:
        state = await super().probe()
        if self._mute:
            state = replace(state, weights=None, weight_version=None, adapter_version=None, sleep_level=0)
        return state

    async def _do(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        await self._points.passing(f"{self._replica_id}: before {name}")
        result = await super()._do(name, act)
        await self._points.passing(f"{self._replica_id}: after {name}")
        return result

    async def close(self) -> None:
        """Let go; the engine goes on."""


class Engines:
    """All engines by replica; what is opened is a new hold on the same engine.

    Mute ones tell nothing of their weights, nor how deep they sleep, like vLLM behind HTTP.
    """

    def __init__(self, mute: bool = False) -> None:
        self.mute = mute
        self.clock = MonotonicClock(0.01)
        self.journal: list[tuple[str, str]] = []
        self.by_id: dict[str, ReferenceEngine] = {}
        self.unreachable: set[str] = set()
        self.disk = SlowDisk()

    def opener(self, points: Points) -> Callable[[ReplicaSpec], Awaitable[Backend]]:
        async def open_backend(spec: ReplicaSpec) -> Backend:
            if spec.replica_id in self.unreachable:
                raise unavailable("NODE_AWAY", f"nobody answers for {spec.replica_id}")
            engine = self.by_id.get(spec.replica_id)
            if engine is None:
                engine = ReferenceEngine(spec, EngineConfig(weights_bytes=1 << 16, kv_bytes=1 << 16), self.clock)
                self.by_id[spec.replica_id] = engine
            return _Seen(engine, self.journal, spec, points, self.mute)

        return open_backend

    @asynccontextmanager
    async def controlled(self, directory: Path, points: Points | None = None, **settings: Any) -> AsyncIterator[Engine]:
        """A controller with these engines; one that dies at `points` writes to `disk`."""
        dies = points is not None
        points = points or Points()
        given = {"data_dir": directory, "grace_s": 0.05, "probe_interval": 3600, **settings}
        async with running(self.clock, open_backend=self.opener(points), **given) as engine:
            book = engine.controller.book
            if dies:
                book._journal = cast(Journal, self.disk)
            durable = book.durable

            async def waiting() -> None:
                await points.passing("before the disk")
                await durable()
                await points.passing("after the disk")

            book.durable = waiting  # type: ignore[method-assign]
            yield engine


class SlowDisk:
    """A journal whose disk is as slow as it may be: it stores records only when somebody waits for them."""

    state = JournalState.OPEN
    compaction_due = False

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self.stored: list[bytes] = []

    @property
    def position(self) -> int:
        return len(self._records)

    @property
    def durable_position(self) -> int:
        return len(self.stored)

    def append(self, stream: str, payload: bytes) -> None:
        self._records.append(payload)

    async def tail(self) -> None:
        until = self.position
        await asyncio.sleep(0)
        self.stored.extend(self._records[self.durable_position : until])


async def write_down(records: list[bytes], directory: Path) -> None:
    """Make the data directory that a controller has left which stored these records."""
    journal = await open_journal(directory / "journal", schema=SCHEMA)
    for record in records:
        journal.append(STREAM, record)
    await journal.close()
