"""All three services in one process, their engines and their directories outlive them.

A crash is a service's data directory as it is at that moment, which is what kill -9 leaves; the next one starts on a
copy, under the same address. Engines are real reference engines that carry their commands out one after the other,
also those whose caller has died: a command that was sent is never unsaid.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.backends.base import (
    Answer,
    Backend,
    EngineOutput,
    EngineProgress,
    EngineRequest,
    engine_dead,
)
from services.engine.domain.engine_state import EngineState
from services.engine.domain.spec import Cache, PauseMode, ReplicaSpec
from services.engine.reference.engine import EngineConfig, ReferenceEngine
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.runtime.clock import ManualClock
from services.runtime.errors import aborted, unavailable
from services.runtime.host import ServiceHost
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings

T = TypeVar("T")

SMALL = EngineConfig(weights_bytes=1 << 12, kv_bytes=1 << 12)
WATCH_S = 0.05
"""Wall seconds between two probes: an engine that died or came back is known soon."""

REPLICA_S = 0.4
"""Wall seconds that a controller gives an engine; one that hangs costs as much."""


class TestClock(ManualClock):
    """A clock that a test moves; `jump` sets the wall clock, as a time server or a person does."""

    __test__ = False

    def jump(self, seconds: float) -> None:
        self._wall_offset += seconds


class Cell:
    """One engine process on its GPUs: what it is doing, and what is wrong with it."""

    def __init__(self, spec: ReplicaSpec, clock: ManualClock, told: Callable[[Cell], None]) -> None:
        self.spec = spec
        self.failing: Counter[str] = Counter()
        self.losing: Counter[str] = Counter()
        self.dead = False
        self.stray = False
        """Whether a supervisor started it and nothing put it to sleep since."""
        self._clock = clock
        self._told = told
        self._at_work: set[asyncio.Task[Any]] = set()
        self.start()

    def start(self) -> None:
        """A fresh process, with all its memory."""
        self.engine = ReferenceEngine(self.spec, SMALL, self._clock)
        self.dead = self.stray = False
        self._one_at_a_time = asyncio.Lock()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    async def start_anew(self) -> None:
        """Its supervisor ends it, if it lives, and starts it, whoever has its GPUs."""
        if not self.dead:
            await self.die()
        self.start()
        self.stray = True

    async def free(self) -> None:
        """Its start script put it to sleep: the trainer is on its GPUs."""
        await self.engine.pause(PauseMode.ABORT, False, 1.0)
        await self.engine.sleep(2, 1.0)

    async def die(self) -> None:
        self.dead = True
        await self.engine.collective_rpc("fault_die", "", None, 1.0)
        self._goes_on.set()

    def hang(self) -> None:
        """Commands are taken, and carried out when it goes on."""
        self._goes_on.clear()

    def heal(self) -> None:
        self.failing.clear()
        self.losing.clear()
        self._goes_on.set()

    @property
    def hangs(self) -> bool:
        return not self._goes_on.is_set()

    @property
    def well(self) -> bool:
        return not (self.dead or self.hangs or +self.failing or +self.losing)

    async def quiet(self) -> None:
        """Return when all commands were carried out, but of an engine that hangs."""
        while self._at_work and not self.hangs:
            await asyncio.wait(set(self._at_work))

    async def awake(self) -> bool:
        """Whether it has memory of its GPUs."""
        return not self.dead and bool((await self.engine.probe()).resident_tags)

    async def do(self, name: str, act: Callable[[ReferenceEngine], Awaitable[T]]) -> T:
        """Have the engine carry a command out, whether or not the caller waits for it."""
        if self.dead:
            raise engine_dead(f"no process answers for {self.spec.replica_id}")
        task = asyncio.ensure_future(self._carry_out(self.engine, name, act))
        self._at_work.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            task.exception()

    async def _carry_out(self, engine: ReferenceEngine, name: str, act: Callable[[ReferenceEngine], Awaitable[T]]) -> T:
        async with self._one_at_a_time:
            await self._goes_on.wait()
            if self.failing[name]:
                self.failing[name] -= 1
                raise aborted("ENGINE_FAILED", f"{name} failed in the engine")
            result = await act(engine)
            if name == "wake_up":
                self._told(self)
            elif name == "sleep":
                self.stray = False
            if self.losing[name]:
                self.losing[name] -= 1
                raise unavailable("REPLY_LOST", f"the reply to {name} was lost")
            return result


@dataclass
class Gate:
    """Where a test stops a command: before the engine has it, or after it was carried out."""

    name: str = ""
    after: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_(self, name: str, *, after: bool) -> None:
        if (name, after) == (self.name, self.after):
            self.arrived.set()
            await self.opened.wait()


class Hold:
    """One controller's hold on an engine."""

    def __init__(self, room: EngineRoom, replica_id: str) -> None:
        self._room = room
        self._replica_id = replica_id

    @property
    def _engine(self) -> ReferenceEngine:
        cell = self._room.cells[self._replica_id]
        if cell.dead:
            raise engine_dead(f"no process answers for {self._replica_id}")
        return cell.engine

    async def _do(self, name: str, act: Callable[[ReferenceEngine], Awaitable[T]]) -> T:
        await self._room.gate.pass_(name, after=False)
        result = await self._room.cells[self._replica_id].do(name, act)
        await self._room.gate.pass_(name, after=True)
        return result

    async def probe(self) -> EngineState:
        return await self._engine.probe()

    async def watch(self) -> None:
        cell = self._room.cells[self._replica_id]
        if not cell.dead:
            await cell.engine.watch()

    async def sleep(self, level: int, timeout: float) -> Answer:
        return await self._do("sleep", lambda engine: engine.sleep(level, timeout))

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        return await self._do("wake_up", lambda engine: engine.wake_up(tags, timeout))

    async def release_kv_cache(self, timeout: float) -> Answer:
        return await self._do("release_kv_cache", lambda engine: engine.release_kv_cache(timeout))

    async def resume_kv_cache(self, timeout: float) -> Answer:
        return await self._do("resume_kv_cache", lambda engine: engine.resume_kv_cache(timeout))

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        return await self._do("pause", lambda engine: engine.pause(mode, clear_cache, timeout))

    async def resume(self, timeout: float) -> Answer:
        return await self._do("resume", lambda engine: engine.resume(timeout))

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        return await self._do(
            "reset_caches",
            lambda engine: engine.reset_caches(caches, reset_running_requests, reset_connectors, timeout),
        )

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._engine.abort(request_ids)

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        return await self._do(
            "collective_rpc", lambda engine: engine.collective_rpc(method, arguments_json, shard, timeout)
        )

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        await self._do(
            "start_weight_update", lambda engine: engine.start_weight_update(update_id, version, adapter, timeout)
        )

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        await self._do(
            "update_weights", lambda engine: engine.update_weights(size, info_json, chunks, timeout, move_index)
        )

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        await self._do("finish_weight_update", lambda engine: engine.finish_weight_update(checksum, timeout))

    async def abort_weight_update(self, timeout: float) -> bool:
        return await self._do("abort_weight_update", lambda engine: engine.abort_weight_update(timeout))

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        async for output in self._engine.generate(request):
            yield output

    async def progress(self) -> EngineProgress:
        return await self._engine.progress()

    async def close(self) -> None:
        """Let go; the engine goes on."""


class EngineRoom:
    """All engines, by replica, and who has which GPU.

    `trained`: the GPUs that a trainer was told to train on, with its run. `faults`: what must never have happened.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.cells: dict[str, Cell] = {}
        self.trained: dict[tuple[str, str], str] = {}
        self.faults: list[str] = []
        self.gate = Gate()
        self._clock = clock

    async def open(self, spec: ReplicaSpec) -> Backend:
        """Connect to the engine of a replica, which was started if need be."""
        if spec.replica_id not in self.cells:
            self.cells[spec.replica_id] = Cell(spec, self._clock, self._woke)
        return Hold(self, spec.replica_id)

    def _woke(self, cell: Cell) -> None:
        for gpu in cell.spec.gpus:
            trainer = self.trained.get((gpu.node, gpu.uuid))
            if trainer is not None:
                self.faults.append(f"{cell.spec.replica_id} woke on {gpu.uuid}, on which {trainer} trains")

    def of(self, run_id: str) -> list[Cell]:
        """The engines of a run."""
        return [cell for replica_id, cell in self.cells.items() if replica_id.startswith(f"{run_id}-")]


class Resident:
    """One service of the house, over all its lives."""

    def __init__(self, root: Path, name: str, make: Callable[[str, Path], ServiceHost], listen: str) -> None:
        self.target = ""
        self.running = False
        self.name = name
        self._root = root / name
        self._make = make
        self._listen = listen
        self._lives = 0

    @property
    def directory(self) -> Path:
        return self._root / f"life-{self._lives}"

    async def start(self) -> None:
        """The next life, on what the one before left."""
        self.host = self._make(self.target or self._listen, self.directory)
        await self.host.start()
        self.target, self.running = self.host.target, True

    async def stop(self) -> None:
        """In order, as SIGTERM does."""
        self.running = False
        await self.host.stop(0)
        self._move()

    async def kill(self) -> None:
        """What is on the disk now is all that is left."""
        self.running = False
        before = self.directory
        self._lives += 1
        shutil.copytree(before, self.directory)
        await self.host.stop(0)

    def _move(self) -> None:
        before = self.directory
        self._lives += 1
        shutil.move(before, self.directory)


class House:
    """Buffer, scheduler, and an engine controller per run."""

    def __init__(self, root: Path, run_ids: Sequence[str]) -> None:
        self.clock = TestClock()
        self.room = EngineRoom(self.clock)
        self.stack = AsyncExitStack()
        self.buffer = Resident(root, "buffer", self._buffer, "127.0.0.1:0")
        self.scheduler = Resident(root, "scheduler", self._scheduler, "127.0.0.1:0")
        self.engines = {run_id: Resident(root, f"engine-{run_id}", self._engine, "127.0.0.1:0") for run_id in run_ids}

    @property
    def residents(self) -> list[Resident]:
        return [self.buffer, self.scheduler, *self.engines.values()]

    async def start(self) -> None:
        for resident in self.residents:
            await resident.start()

    async def close(self) -> None:
        await self.stack.aclose()
        for cell in self.room.cells.values():
            cell.heal()
        for resident in self.residents:
            if resident.running:
                await resident.host.stop(0)

    async def channel(self, target: str) -> grpc.aio.Channel:
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 50),
        ]
        return await self.stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))

    def _buffer(self, listen: str, directory: Path) -> ServiceHost:
        return build_buffer(BufferSettings(listen=[listen], data_dir=directory), self.clock)

    def _engine(self, listen: str, directory: Path) -> ServiceHost:
        settings = EngineSettings(
            listen=[listen],
            data_dir=directory,
            probe_interval=WATCH_S,
            engine_timeout=REPLICA_S,
            grace_s=0.05,
        )
        return build_engine(settings, self.clock, self.room.open)

    def _scheduler(self, listen: str, directory: Path) -> ServiceHost:
        settings = SchedulerSettings(
            listen=[listen],
            data_dir=directory,
            transition_attempts=1,
            transition_backoff_s=0.0,
            reclaim_patience_s=0.0,
            peer_attempts=1,
            peer_backoff_s=0.0,
            watch_progress=False,
        )
        return build_scheduler(settings, self.clock)
