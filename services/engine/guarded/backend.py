"""The backend of an engine with vLLM's calls, however they travel: the safety that such an engine does not give.

Invariants: control calls go one after the other and none overtakes one that was given up; what `Residency` refuses
never reaches the engine; "wait" is waited for here, since vLLM cannot take a wait back; a sleep counts only if the
memory is measured free, where that can be measured; a request id is live once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from services.engine.backends.base import Answer, EngineOutput, EngineProgress, EngineRequest
from services.engine.domain.engine_state import NATIVE_RELEASE, EngineState
from services.engine.domain.operations import Shard
from services.engine.domain.spec import KV_CACHE, WEIGHTS, Cache, PauseMode, ReplicaSpec, Weights
from services.engine.guarded import surface as calls
from services.engine.guarded.line import Line
from services.engine.guarded.memory import Memory, check_freed
from services.engine.guarded.movers import Movers
from services.engine.guarded.requests import Requests
from services.engine.guarded.residency import Residency
from services.engine.guarded.surface import Reading, Surface
from services.runtime.clock import Clock
from services.runtime.errors import (
    Code,
    TurnoutError,
    aborted,
    deadline_exceeded,
    failed_precondition,
    invalid_argument,
)

T = TypeVar("T")

DRAIN_LOOK_S: Final = 0.02
"""Wall seconds between two counts of what is left in an engine; vLLM has no event for it."""

LOOK_S: Final = 0.5
"""Wall seconds between two looks at an idle engine: its death is known within a second, and over HTTP a look costs a
millisecond or two of processor time."""

NEEDED: Final = frozenset({calls.PAUSE, calls.PAUSE_MODE})
"""Without these an engine cannot be stopped safely (vLLM before 0.18)."""

_REFUSALS: Final = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.NOT_FOUND)
"""What we say instead of calling the engine, or it instead of acting."""


class GuardedBackend:
    """One engine: vLLM, SGLang or a server of verl, by its surface."""

    def __init__(self, spec: ReplicaSpec, surface: Surface, clock: Clock, spool: str | None = None) -> None:
        missing = NEEDED - surface.offers
        if missing:
            raise failed_precondition(
                "ENGINE_TOO_OLD",
                f"the engine of {spec.replica_id} lacks {', '.join(sorted(missing))}: vLLM has them from 0.18",
                replica_id=spec.replica_id,
            )
        self._spec = spec
        self._surface = surface
        self._line = Line(spec.replica_id, surface.check)
        self._state = Residency(
            spec.replica_id,
            surface.tags,
            version=spec.weight_version or 0,
            weights=Weights.INTACT if spec.weights_loaded else Weights.DISCARDED,
        )
        self._movers = Movers(spec.replica_id, surface, spool)
        self._requests = Requests(spec.replica_id, surface, clock)
        self._memory = Memory()
        self._new_version = 0
        self._update_id = ""
        self._before_update = self._state.weights

    # ---------------------------------------------------------------------------------------------------------- state

    async def probe(self) -> EngineState:
        await self._surface.check()
        if self._line.overdue:
            raise deadline_exceeded(
                "ENGINE_UNRESPONSIVE",
                f"{self._line.busy} of {self._spec.replica_id} should have ended",
                replica_id=self._spec.replica_id,
            )
        # An engine that carries out a call answers nothing else; what was known before then has to do. So has it if a
        # call came in between, since the reading may be older than what it did.
        if not self._line.busy:
            begun = self._line.begun
            reading = await self._surface.read()
            if self._line.begun == begun:
                return self._learn(reading)
        return self._tell(self._requests.live)

    def _learn(self, reading: Reading) -> EngineState:
        self._memory.take(reading)
        self._state.observe(reading)
        return self._tell(reading.unfinished)

    def _tell(self, unfinished: int) -> EngineState:
        state = self._state
        return EngineState(
            declared_tags=state.tags,
            resident_tags=state.resident,
            sleep_level=state.level,
            paused=state.paused,
            pause_mode=state.pause_mode,
            running=max(unfinished, self._requests.live),
            capabilities=self._capabilities(),
            weights=state.weights,
            weight_version=state.version,
            memory_bytes=self._memory.used,
            tag_bytes=self._memory.tagged,
            incarnation=self._surface.incarnation,
        )

    def _capabilities(self) -> frozenset[str]:
        named = {
            calls.SLEEP: "sleep",
            calls.WAKE_TAGS: "wake_tags",
            calls.RELEASE_KV: NATIVE_RELEASE,
            calls.KEEP: "pause_keep",
            calls.WEIGHT_TRANSFER: "weight_transfer",
            calls.WEIGHT_VERSION: "weight_version",
            calls.MEMORY: "memory",
        }
        offered = {name for call, name in named.items() if call in self._surface.offers}
        return frozenset(offered | {"pause_wait"})

    async def watch(self) -> None:
        try:
            while True:
                # A call that is under way looks by itself.
                if not self._line.busy:
                    await self._surface.check()
                await asyncio.sleep(LOOK_S)
        except TurnoutError:
            return

    async def progress(self) -> EngineProgress:
        await self._surface.check()
        return self._requests.progress(held=self._state.paused)

    # ------------------------------------------------------------------------------------------------ pause and memory

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        async def work() -> Reading:
            if mode is PauseMode.KEEP:
                self._need(calls.KEEP, "it keeps no requests over a pause")
            if mode is PauseMode.WAIT:
                await self._drained()
            # After the wait nothing is left to abort, and unlike vLLM's own wait this one cannot outlive its caller.
            kept = mode is PauseMode.KEEP
            await self._surface.pause("keep" if kept else "abort", clear_cache)
            self._state.stopped(mode)
            return await self._surface.read(memory=False)

        return await self._do("pause", work, timeout)

    async def resume(self, timeout: float) -> Answer:
        async def work() -> Reading:
            self._state.check_resume()
            await self._surface.resume()
            self._state.started()
            return await self._surface.read(memory=False)

        return await self._do("resume", work, timeout)

    async def sleep(self, level: int, timeout: float) -> Answer:
        async def work() -> Reading:
            self._state.check_sleep(level, max(self._requests.live, await self._surface.unfinished()))
            if self._state.updating:
                # Its trainer is taken off it: what was moved counts for nothing.
                await self._abandon()
            self._need(calls.SLEEP, "it was started without sleep mode, so a sleep would free nothing")
            if self._surface.schedules_when_awake and self._state.asleep == {WEIGHTS}:
                # vLLM takes an engine without weights for asleep, and would leave its KV memory where it is.
                await self._surface.wake_up(None)
                self._state.woke(frozenset({WEIGHTS}))
            before = None if self._state.asleep == self._state.tags else await self._surface.read()
            kept = self._state.paused and self._state.pause_mode is PauseMode.KEEP
            deeper = self._state.level == 1 and level == 2 and self._state.asleep == self._state.tags
            if deeper:
                raise failed_precondition(
                    "ASLEEP_AT_OTHER_LEVEL", f"{self._spec.replica_id} sleeps at level 1 and goes no deeper"
                )
            await self._surface.sleep(level, "keep" if kept else "abort")
            after = await self._surface.read()
            if before is not None:
                check_freed(self._spec.replica_id, before, after)
            self._state.slept(level)
            return after

        return await self._do("sleep", work, timeout, moves_memory=True)

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        wanted = frozenset(tags)
        self._state.check_tags(wanted)

        async def work() -> Reading:
            await self._wake(wanted)
            return await self._surface.read()

        return await self._do("wake_up", work, timeout, moves_memory=True)

    async def release_kv_cache(self, timeout: float) -> Answer:
        async def work() -> Reading:
            self._state.check_release()
            self._need(calls.RELEASE_KV, "it cannot release KV memory alone")
            # Also when the call fails vLLM counts the tag as asleep from now on.
            self._state.released()
            await self._surface.release_kv_cache()
            return await self._surface.read()

        return await self._do("release_kv_cache", work, timeout, moves_memory=True)

    async def resume_kv_cache(self, timeout: float) -> Answer:
        async def work() -> Reading:
            await self._wake(frozenset({KV_CACHE}))
            return await self._surface.read()

        return await self._do("resume_kv_cache", work, timeout, moves_memory=True)

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        async def work() -> None:
            offers, surface = self._surface.offers, self._surface
            if Cache.PREFIX in caches:
                running = reset_running_requests and calls.RESET_RUNNING in offers
                if not await surface.reset_prefix_cache(running, reset_connectors and calls.RESET_CONNECTORS in offers):
                    raise failed_precondition(
                        "CACHE_BUSY",
                        f"running requests hold blocks of the prefix cache of {self._spec.replica_id}",
                        replica_id=self._spec.replica_id,
                    )
                self._state.cache_stale = False
            if not surface.text_only:
                if Cache.MULTIMODAL in caches:
                    self._need(calls.RESET_MM, "it cannot reset its multimodal cache")
                if Cache.ENCODER in caches:
                    self._need(calls.RESET_ENCODER, "it cannot reset its encoder cache")
            if Cache.MULTIMODAL in caches and calls.RESET_MM in offers:
                await surface.reset_mm_cache()
            if Cache.ENCODER in caches and calls.RESET_ENCODER in offers:
                await surface.reset_encoder_cache()

        return await self._do("reset_caches", work, timeout)

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        arguments: Mapping[str, Any] = json.loads(arguments_json) if arguments_json else {}
        if shard is not None:
            raise invalid_argument("shard", "the engine calls all its workers or none", value=shard)
        self._need(calls.COLLECTIVE_RPC, "it offers no collective RPC")

        async def work() -> list[Any]:
            if WEIGHTS in self._state.asleep:
                raise failed_precondition("TAG_ASLEEP", f"{self._spec.replica_id}: its weights are asleep")
            answers = await self._surface.collective_rpc(method, arguments.get("args", ()), arguments.get("kwargs", {}))
            if method == "reload_weights":
                self._state.loaded(self._state.version)
            return answers

        answers = await self._line.call(f"collective_rpc {method}", work, timeout)
        return Answer(tuple(Shard(rank, True, json.dumps(each, default=str)) for rank, each in enumerate(answers)))

    # -------------------------------------------------------------------------------------------------------- weights

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        if adapter:
            raise invalid_argument("adapter", "adapters are not moved through this backend", value=True)

        async def work() -> None:
            if WEIGHTS in self._state.asleep:
                raise failed_precondition("TAG_ASLEEP", f"{self._spec.replica_id}: its weights are asleep")
            if not self._state.updating:
                self._before_update = self._state.weights
            self._state.updating = True
            self._new_version = version
            again, self._update_id = update_id == self._update_id, update_id
            if not again:
                await self._movers.abandon()

        await self._do("start_weight_update", work, timeout)

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        # Bytes arrive at the sender's pace; only what the engine does with them has a deadline.
        self._state.check_write()
        move = await self._movers.receive(size, info_json, chunks, move_index)

        async def work() -> None:
            self._state.check_write()
            self._state.touched()
            await self._movers.move(move)

        try:
            await self._do("update_weights", work, timeout)
        finally:
            move.close()

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        async def work() -> None:
            self._state.check_write()
            if not self._movers.moved and self._before_update is not Weights.INTACT:
                raise aborted(
                    "WEIGHTS_INCOMPLETE",
                    f"no weights were moved to {self._spec.replica_id}, and it has none from before",
                    replica_id=self._spec.replica_id,
                )
            self._movers.check(checksum)
            await self._movers.finish(self._new_version)
            self._state.loaded(self._new_version)
            self._state.updating = False

        await self._do("finish_weight_update", work, timeout)

    async def abort_weight_update(self, timeout: float) -> bool:
        async def work() -> bool:
            await self._abandon()
            return self._state.weights is Weights.HALF_UPDATED

        return await self._line.call("abort_weight_update", work, timeout)

    # ----------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        await self._surface.check()
        self._state.admit()
        async for output in self._requests.run(request, lambda: self._state.version):
            yield output

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._requests.abort(request_ids)

    async def close(self) -> None:
        self._line.drop()
        await self._surface.close()

    # --------------------------------------------------------------------------------------------------------- inside

    async def _do(
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, Reading | None]],
        timeout: float,
        *,
        moves_memory: bool = False,
    ) -> Answer:
        """Make a call; `work` returns what the engine told after it, if it was asked."""

        async def watched() -> EngineState | None:
            try:
                reading = await work()
            except BaseException as error:
                # What was refused before it reached the engine changed nothing there. A connection that broke says
                # nothing of what the engine did.
                refused = isinstance(error, TurnoutError) and error.code in _REFUSALS
                self._state.doubtful |= moves_memory and not refused
                raise
            if reading is None:
                return None
            return self._learn(reading)

        state = await self._line.call(what, watched, timeout)
        return Answer(tuple(Shard(rank, True) for rank in range(self._spec.shards)), state)

    async def _wake(self, wanted: frozenset[str]) -> None:
        state = self._state
        missing = wanted & state.asleep
        if not missing:
            return
        if missing == state.asleep:
            await self._surface.wake_up(None)
        else:
            for tag in sorted(missing):
                await self._surface.wake_up([tag])
        # With the last tag vLLM schedules again, whatever its weights are.
        kept = state.pause_mode is PauseMode.KEEP
        state.woke(missing, self._surface.schedules_when_awake)
        if not state.asleep and not state.paused and not state.fit():
            await self._surface.pause("keep" if kept else "abort", False)
            state.stopped(PauseMode.KEEP if kept else PauseMode.ABORT)

    async def _abandon(self) -> None:
        self._state.updating = False
        await self._movers.abandon()

    async def _drained(self) -> None:
        while max(self._requests.live, await self._surface.unfinished()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(DRAIN_LOOK_S)

    def _need(self, call: str, why: str) -> None:
        if call not in self._surface.offers:
            raise failed_precondition(
                "NOT_OFFERED", f"{self._spec.replica_id}: {why}", replica_id=self._spec.replica_id, call=call
            )
