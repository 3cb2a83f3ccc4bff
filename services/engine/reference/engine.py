"""The reference engine: one replica on the CPU, with the habits and the hazards of a real one.

Invariants: all requests are decoded by one fluid clock; a stream ends once; memory that is asleep has no buffer.
Hazards, kept on purpose: a request that reaches an engine with memory asleep kills it, so does putting it to sleep
while requests run and writing weights into memory that is asleep; a wake with an unknown tag does nothing; waking the
last tag starts scheduling; without weights it generates garbage and reports no error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.engine.backends.base import (
    Answer,
    EngineOutput,
    EngineProgress,
    EngineRequest,
    engine_dead,
)
from services.engine.domain.engine_state import NATIVE_RELEASE, EngineState
from services.engine.domain.operations import Shard
from services.engine.domain.requests import Finish
from services.engine.domain.spec import KV_CACHE, WEIGHTS, Cache, PauseMode, ReplicaSpec, Weights
from services.engine.reference.batch import Batch
from services.engine.reference.decode import Curve
from services.engine.reference.faults import FAULTS, Faults
from services.engine.reference.memory import Memory
from services.engine.reference.model import PseudoModel
from services.engine.reference.streams import Stream
from services.runtime.clock import Clock
from services.runtime.errors import aborted, data_loss, failed_precondition, invalid_argument, out_of_range

CAPABILITIES: Final = frozenset(
    {"sleep", "wake_tags", NATIVE_RELEASE, "pause_wait", "pause_keep", "weight_chunks", "weight_checksum"}
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in bytes per shard; durations in domain seconds that a call takes on top of the real memory work."""

    model: PseudoModel = field(default_factory=PseudoModel)
    curve: Curve = field(default_factory=Curve)
    weights_bytes: int = 4 << 20
    kv_bytes: int = 16 << 20
    sleep_seconds: float = 0.0
    wake_seconds: float = 0.0
    load_seconds: float = 0.0


class ReferenceEngine:
    """A backend that is its own engine."""

    def __init__(self, spec: ReplicaSpec, config: EngineConfig, clock: Clock) -> None:
        self._spec = spec
        self._config = config
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        self._shards = [Memory(config.weights_bytes, config.kv_bytes) for _ in range(spec.shards)]
        self._faults = Faults()
        self._dead = ""
        self._died = asyncio.Event()
        self._sleep_level = 0
        self._pause_mode: PauseMode | None = None
        self._paused = False
        self._weights = Weights.INTACT if spec.weights_loaded else Weights.DISCARDED
        self._version = spec.weight_version or 0
        self._first_version = self._version
        self._adapter_version: int | None = None
        self._update: tuple[int, bool] | None = None
        self._update_id = ""
        self._before_update = self._weights
        self._begins: list[int] = []
        """Where each move of the update began."""
        self._written = 0
        self.batch = Batch(clock, config.curve, self._version, self._weights is not Weights.INTACT)

    # ---------------------------------------------------------------------------------------------------------- state

    @property
    def _asleep(self) -> frozenset[str]:
        return self._shards[0].tags - self._shards[0].resident

    async def probe(self) -> EngineState:
        await self._faults.strike_probe()
        self._require_alive()
        return EngineState(
            declared_tags=self._shards[0].tags,
            resident_tags=self._shards[0].resident,
            sleep_level=self._sleep_level,
            paused=self._paused,
            pause_mode=self._pause_mode,
            running=self.batch.active,
            capabilities=CAPABILITIES,
            weights=self._weights,
            weight_version=self._version,
            adapter_version=self._adapter_version,
            memory_bytes=sum(memory.size for memory in self._shards),
            tag_bytes={tag: sum(each.behind(tag) for each in self._shards) for tag in self._shards[0].tags},
            incarnation=self._incarnation,
        )

    async def watch(self) -> None:
        await self._died.wait()

    async def progress(self) -> EngineProgress:
        self._require_alive()
        decode = self.batch.read()
        tokens = decode.tokens()
        streams = self.batch.streams.items()
        return EngineProgress(
            output_tokens={key: len(stream.request.output) + tokens.get(key, 0) for key, stream in streams},
            decoded_tokens=decode.decoded_tokens,
            prefilled_tokens=decode.prefilled_tokens,
            prefill_seconds=decode.prefill_seconds,
            running=decode.running,
            waiting=decode.waiting + self.batch.held,
        )

    # ------------------------------------------------------------------------------------------------ pause and memory

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        await self._enter("pause")
        self._paused, self._pause_mode = True, mode
        if mode is PauseMode.ABORT:
            self.batch.abort_all()
        elif mode is PauseMode.KEEP:
            self.batch.freeze()
            if clear_cache:
                self.batch.recompute()
        else:
            await self.batch.drained()
            self._require_alive()
        return self._each_shard()

    async def resume(self, timeout: float) -> Answer:
        await self._enter("resume")
        self._start_scheduling()
        return self._each_shard()

    async def sleep(self, level: int, timeout: float) -> Answer:
        await self._enter("sleep")
        if self.batch.active:
            self._die("its memory was freed while requests were running")
        self.batch.abort_all()
        await self._clock.sleep(self._config.sleep_seconds)
        self._require_alive()
        for memory in self._shards:
            memory.sleep(level)
        self._sleep_level = level
        if level == 2:
            self._change_weights(Weights.DISCARDED, self._version)
        if not self._paused:
            self._paused, self._pause_mode = True, PauseMode.ABORT
        return self._each_shard()

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        await self._enter("wake_up")
        wanted = frozenset(tags)
        if not wanted <= self._shards[0].tags:
            return self._each_shard()
        if wanted & self._asleep:
            await self._clock.sleep(self._config.wake_seconds)
            self._require_alive()
        self._refill(wanted)
        return self._each_shard()

    async def release_kv_cache(self, timeout: float) -> Answer:
        await self._enter("release_kv_cache")
        if not self._paused or self._asleep:
            raise failed_precondition("NOT_PAUSED", "KV memory is freed from a paused engine that is fully awake")
        for memory in self._shards:
            memory.release(KV_CACHE)
        return self._each_shard()

    async def resume_kv_cache(self, timeout: float) -> Answer:
        await self._enter("resume_kv_cache")
        self._refill(frozenset({KV_CACHE}))
        return self._each_shard()

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        await self._enter("reset_caches")
        if Cache.PREFIX in caches and self.batch.active:
            if not reset_running_requests:
                raise failed_precondition("CACHE_BUSY", "running requests hold blocks of the prefix cache")
            self.batch.recompute()
        return self._each_shard()

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        arguments = json.loads(arguments_json) if arguments_json else {}
        named: dict[str, Any] = arguments.get("kwargs", {})
        if method == "fault_die":
            self._fail_all("it was told to die")
        elif method in FAULTS:
            self._faults.switch(method, named)
        else:
            await self._enter("collective_rpc")
            return self._call_workers(method, shard)
        return self._each_shard()

    # ----------------------------------------------------------------------------------------------------------
    # weights

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        await self._enter("start_weight_update")
        if self._update is not None and update_id == self._update_id:
            return
        if WEIGHTS in self._asleep:
            self._die("weights were written into memory that is asleep")
        self._update_id = update_id
        self._update = (version, adapter)
        self._before_update = self._weights
        self._written = 0
        self._begins.clear()

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        await self._enter("update_weights")
        self._require_update()
        # A further move goes behind those before it; one that is sent again, to where it began.
        if move_index > len(self._begins):
            raise failed_precondition(
                "MOVE_OUT_OF_ORDER",
                f"{self._spec.replica_id} got {len(self._begins)} moves, and none of number {move_index - 1}",
                field="move_index",
                value=move_index,
                current=len(self._begins),
            )
        if move_index < len(self._begins):
            self._written = self._begins[move_index]
            del self._begins[move_index:]
        begin = self._written
        if begin + size > self._config.weights_bytes:
            raise out_of_range(
                "WEIGHTS_TOO_LARGE",
                f"{self._spec.replica_id} holds {self._config.weights_bytes} bytes of weights",
                field="size",
                value=begin + size,
            )
        written = 0
        async for chunk in chunks:
            self._require_alive()
            self._change_weights(Weights.HALF_UPDATED, self._version)
            for memory in self._shards:
                memory.write(begin + written, chunk)
            written += len(chunk)
        if written != size:
            raise aborted("WEIGHTS_INCOMPLETE", f"{written} of {size} bytes of weights arrived")
        await self._clock.sleep(self._config.load_seconds * (begin == 0))
        self._require_alive()
        self._written = begin + written
        self._begins.append(begin)

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        await self._enter("finish_weight_update")
        version, adapter = self._require_update()
        for memory in self._shards:
            memory.loaded = self._written or memory.loaded
            if checksum and memory.checksum() != checksum:
                raise data_loss(
                    "CHECKSUM_MISMATCH",
                    f"the weights of {self._spec.replica_id} have another checksum than the trainer's",
                    value=checksum,
                    current=memory.checksum(),
                )
        if not self._written and self._weights is not Weights.INTACT:
            raise aborted("WEIGHTS_INCOMPLETE", "no weights arrived and there are none from before")
        self._update = None
        if adapter:
            self._adapter_version = version
            self._change_weights(self._before_update, self._version)
        else:
            self._change_weights(Weights.INTACT, version)

    async def abort_weight_update(self, timeout: float) -> bool:
        await self._enter("abort_weight_update")
        self._update = None
        return self._weights is Weights.HALF_UPDATED

    # -------------------------------------------------------------------------------------------------------
    # generation

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self._require_alive()
        if self._asleep:
            self._die("a request reached it while memory was asleep")
        script = self._config.model.script(request.prompt, request.sampling, request.max_tokens)
        stream = Stream(request, script)
        self.batch.add(stream, hold=self._paused)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finish is not None:
                    return
        finally:
            if not stream.ended:
                self.batch.end(request.request_id, Finish.ABORT)

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        self._require_alive()
        if request_ids is None:
            self.batch.abort_all()
        for request_id in request_ids or ():
            self.batch.end(request_id, Finish.ABORT)

    async def close(self) -> None:
        if not self._dead:
            self._fail_all("it was closed")

    # ------------------------------------------------------------------------------------------------------------
    # inside

    async def _enter(self, call: str) -> None:
        self._require_alive()
        await self._faults.strike(call)
        self._require_alive()

    def _require_alive(self) -> None:
        if self._dead:
            raise engine_dead(f"the engine of {self._spec.replica_id} died: {self._dead}")

    def _die(self, why: str) -> None:
        self._fail_all(why)
        self._require_alive()

    def _fail_all(self, why: str) -> None:
        self._dead = why
        self._died.set()
        self.batch.fail_all(engine_dead(f"the engine of {self._spec.replica_id} died: {why}"))

    def _require_update(self) -> tuple[int, bool]:
        if self._update is None:
            raise failed_precondition("UPDATE_NOT_STARTED", "the engine expects no weights")
        return self._update

    def _call_workers(self, method: str, shard: int | None) -> Answer:
        if shard is not None and not 0 <= shard < len(self._shards):
            raise out_of_range("NO_SUCH_SHARD", f"there are {len(self._shards)} shards", field="shard", value=shard)
        chosen = range(len(self._shards)) if shard is None else [shard]
        if method == "weight_checksum":
            return Answer(tuple(Shard(i, True, json.dumps(self._shards[i].checksum())) for i in chosen))
        if method == "reload_weights":
            if WEIGHTS in self._asleep:
                self._die("weights were written into memory that is asleep")
            self._change_weights(Weights.INTACT, self._first_version)
            return Answer(tuple(Shard(i, True, "null") for i in chosen))
        raise invalid_argument("method", f"the reference engine has no method {method!r}", value=method)

    def _each_shard(self) -> Answer:
        return Answer(tuple(Shard(i, True) for i in range(len(self._shards))))

    def _refill(self, tags: frozenset[str]) -> None:
        for memory in self._shards:
            memory.wake(tags)
        if not self._asleep:
            self._sleep_level = 0
            self._start_scheduling()

    def _start_scheduling(self) -> None:
        self._paused, self._pause_mode = False, None
        self.batch.start()

    def _change_weights(self, weights: Weights, version: int) -> None:
        if (weights, version) != (self._weights, self._version):
            self._weights, self._version = weights, version
            self.batch.change_weights(version, weights is not Weights.INTACT)
