"""A backend that records what the controller asks of an engine, and fails or hangs on command.

Behind it is a real reference engine, so that states and hazards are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from services.engine.backends.base import Answer, Backend, EngineOutput, EngineProgress, EngineRequest
from services.engine.domain.engine_state import EngineState
from services.engine.domain.operations import Shard
from services.engine.domain.spec import Cache, PauseMode, ReplicaSpec
from services.engine.reference.engine import EngineConfig, ReferenceEngine
from services.runtime.clock import Clock, MonotonicClock
from services.runtime.errors import TurnoutError
from tests.engine.helpers import Engine, Output, generate, register, running, until

T = TypeVar("T")


class Recorder:
    """One engine: `calls` are the names of its commands in order; `faults` strike the next calls of a name.

    A fault is an error to raise before the engine does anything, or an event to wait for; `lost` names calls whose
    reply is lost after the engine carried them out.
    """

    def __init__(self, engine: ReferenceEngine, journal: list[tuple[str, str]], replica_id: str) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.faults: dict[str, list[TurnoutError | asyncio.Event]] = {}
        self.lost: dict[str, TurnoutError] = {}
        self.shards_reached: int | None = None
        self._journal = journal
        self._replica_id = replica_id

    async def _do(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(name)
        self._journal.append((self._replica_id, name))
        faults = self.faults.get(name, [])
        if faults:
            fault = faults.pop(0)
            if isinstance(fault, TurnoutError):
                raise fault
            await fault.wait()
        result = await act()
        if name in self.lost:
            raise self.lost.pop(name)
        return result

    def _reach(self, answer: Answer) -> Answer:
        if self.shards_reached is None:
            return answer
        return Answer(tuple(Shard(shard.shard, shard.ok) for shard in answer.shards[: self.shards_reached]))

    async def probe(self) -> EngineState:
        faults = self.faults.get("probe", [])
        if faults:
            fault = faults[0]
            if isinstance(fault, TurnoutError):
                raise fault
            await fault.wait()
        state = await self.engine.probe()
        return state

    async def watch(self) -> None:
        await self.engine.watch()

    async def sleep(self, level: int, timeout: float) -> Answer:
        return self._reach(await self._do(f"sleep({level})", lambda: self.engine.sleep(level, timeout)))

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        return await self._do(f"wake_up({','.join(tags)})", lambda: self.engine.wake_up(tags, timeout))

    async def release_kv_cache(self, timeout: float) -> Answer:
        return await self._do("release_kv_cache", lambda: self.engine.release_kv_cache(timeout))

    async def resume_kv_cache(self, timeout: float) -> Answer:
        return await self._do("resume_kv_cache", lambda: self.engine.resume_kv_cache(timeout))

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        return await self._do(f"pause({mode.value})", lambda: self.engine.pause(mode, clear_cache, timeout))

    async def resume(self, timeout: float) -> Answer:
        return await self._do("resume", lambda: self.engine.resume(timeout))

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        names = ",".join(sorted(cache.value for cache in caches))
        return await self._do(
            f"reset({names})",
            lambda: self.engine.reset_caches(caches, reset_running_requests, reset_connectors, timeout),
        )

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._do("abort", lambda: self.engine.abort(request_ids))

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        return self._reach(
            await self._do(
                f"collective_rpc({method})",
                lambda: self.engine.collective_rpc(method, arguments_json, shard, timeout),
            )
        )

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        await self._do(
            "start_weight_update", lambda: self.engine.start_weight_update(update_id, version, adapter, timeout)
        )

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        await self._do(
            "update_weights", lambda: self.engine.update_weights(size, info_json, chunks, timeout, move_index)
        )

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        await self._do("finish_weight_update", lambda: self.engine.finish_weight_update(checksum, timeout))

    async def abort_weight_update(self, timeout: float) -> bool:
        return await self._do("abort_weight_update", lambda: self.engine.abort_weight_update(timeout))

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self._journal.append((self._replica_id, "generate"))
        async for output in self.engine.generate(request):
            yield output

    async def progress(self) -> EngineProgress:
        return await self.engine.progress()

    async def close(self) -> None:
        await self.engine.close()


class Recorders:
    """Opens recorders; `journal` has the calls of all of them in order."""

    def __init__(self, clock: Clock, config: EngineConfig | None = None) -> None:
        self._clock = clock
        self._config = config or EngineConfig(weights_bytes=1 << 16, kv_bytes=1 << 16)
        self.journal: list[tuple[str, str]] = []
        self.by_id: dict[str, Recorder] = {}

    async def open(self, spec: ReplicaSpec) -> Backend:
        """A recorder for a replica."""
        recorder = Recorder(ReferenceEngine(spec, self._config, self._clock), self.journal, spec.replica_id)
        self.by_id[spec.replica_id] = recorder
        return recorder

    def __getitem__(self, replica_id: str) -> Recorder:
        return self.by_id[replica_id]

    def forget(self) -> None:
        """Start recording anew."""
        self.journal.clear()
        for recorder in self.by_id.values():
            recorder.calls.clear()


@asynccontextmanager
async def recorded(
    *named: str, scale: float = 0.01, spec_fields: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Engine, Recorders]]:
    """A controller over recorders; `named` are replicas as ID:ROLE."""
    clock = MonotonicClock(scale)
    recorders = Recorders(clock)
    async with running(clock, open_backend=recorders.open, **settings) as engine:
        for name in named:
            replica_id, _, role = name.partition(":")
            await register(engine, replica_id, role, **(spec_fields or {}))
        yield engine, recorders


@asynccontextmanager
async def requests_running(
    engine: Engine, count: int, *, max_tokens: int = 100_000, **fields: Any
) -> AsyncIterator[list[asyncio.Task[Output]]]:
    """Requests that engines have; they are cancelled at the end unless they ended before."""
    before = in_engines(engine)
    tasks = [
        asyncio.create_task(generate(engine, f"running-{i}", (i, 7), max_tokens=max_tokens, **fields))
        for i in range(count)
    ]
    try:
        await until(lambda: in_engines(engine) == before + count, timeout=30)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_engines(engine: Engine) -> int:
    """Requests that engines have."""
    return sum(len(slot.forwards) for slot in engine.controller.fleet.all)
