"""vLLM's AsyncLLM in this process.

Invariants: vLLM is imported only when an engine is started; what an engine offers is read from its methods and their
parameters; an engine whose processes died is dead for good. Its requests all come through here, so the numbers of its
front end are the numbers of the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from services.engine.backends.base import engine_dead
from services.engine.domain.requests import Finish
from services.engine.guarded import surface as calls
from services.engine.guarded.residency import TAGS
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.engine.vllm.config import VllmConfig
from services.engine.vllm.memory import MEMORY_METHOD, read_memory
from services.engine.vllm.plugin import OWNER
from services.runtime.errors import TurnoutError, aborted, describe, invalid_argument, unavailable

T = TypeVar("T")

SHUTDOWN_S: Final = 3.0
"""Wall seconds that the processes of an engine have to end; then vLLM kills them."""

METHODS: Final = {
    calls.SLEEP: ("sleep", ""),
    calls.SLEEP_MODE: ("sleep", "mode"),
    calls.WAKE_TAGS: ("wake_up", "tags"),
    calls.RELEASE_KV: ("release_kv_cache_memory", ""),
    calls.PAUSE: ("pause_generation", ""),
    calls.PAUSE_MODE: ("pause_generation", "mode"),
    calls.KEEP: ("pause_generation", "mode"),
    calls.IS_PAUSED: ("is_paused", ""),
    calls.RESET_RUNNING: ("reset_prefix_cache", "reset_running_requests"),
    calls.RESET_CONNECTORS: ("reset_prefix_cache", "reset_connector"),
    calls.RESET_MM: ("reset_mm_cache", ""),
    calls.RESET_ENCODER: ("reset_encoder_cache", ""),
    calls.COLLECTIVE_RPC: ("collective_rpc", ""),
    calls.RELOAD: ("collective_rpc", ""),
    calls.WEIGHT_TRANSFER: ("update_weights", ""),
    calls.WEIGHT_FILES: ("update_weights", ""),
    calls.WEIGHT_SESSIONS: ("start_weight_update", ""),
    calls.WEIGHT_VERSION: ("update_weight_version", ""),
}
"""What makes a call available: a method, and a parameter of it if one is named."""

FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT, "repetition": Finish.STOP}


def offered(engine_class: type) -> frozenset[str]:
    """Which calls this AsyncLLM class has."""
    found = set()
    for call, (method, parameter) in METHODS.items():
        function = getattr(engine_class, method, None)
        if function is not None and (not parameter or parameter in inspect.signature(function).parameters):
            found.add(call)
    return frozenset(found)


async def start(config: VllmConfig) -> AsyncLlmSurface:
    """Start an engine, which takes half a minute and more; FAILED_PRECONDITION / ENGINE_NOT_STARTED if it does not.

    It starts in a thread, so that the service goes on answering.
    """
    for name, value in config.variables().items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())
    starting = asyncio.ensure_future(asyncio.to_thread(_start, config.arguments()))
    try:
        engine = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A thread cannot be stopped; what it brings is ended as soon as it is there.
        starting.add_done_callback(_end)
        raise
    except Exception as error:
        raise unavailable("ENGINE_NOT_STARTED", f"vLLM did not start: {describe(error)[:500]}") from error
    surface = AsyncLlmSurface(engine)
    await surface.find_memory_calls()
    return surface


def _start(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _end(starting: asyncio.Future[Any]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().shutdown()


class AsyncLlmSurface:
    """An AsyncLLM. `engine` may be anything with its methods."""

    tags = TAGS
    schedules_when_awake = True

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self.engine = engine
        self.incarnation = secrets.token_hex(8)
        self._live: set[str] = set()
        self._init_request = WeightTransferInitRequest
        self._update_request = WeightTransferUpdateRequest
        self._params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        config = engine.vllm_config
        self.vocabulary: int | None = int(config.model_config.get_vocab_size())
        self.longest: int | None = int(config.model_config.max_model_len)
        self.text_only = not config.model_config.is_multimodal_model
        offers = set(offered(type(engine)))
        if not self._frees_memory(config):
            # Such an engine takes the calls, goes through all its states and frees nothing.
            offers -= {calls.SLEEP, calls.SLEEP_MODE, calls.RELEASE_KV}
        if config.weight_transfer_config is None:
            offers -= {calls.WEIGHT_TRANSFER, calls.WEIGHT_FILES, calls.WEIGHT_SESSIONS}
        self.offers = frozenset(offers)

    @staticmethod
    def _frees_memory(config: Any) -> bool:
        worker = config.parallel_config.worker_cls
        name = worker if isinstance(worker, str) else f"{worker.__module__}.{worker.__qualname__}"
        return bool(config.model_config.enable_sleep_mode) or name.endswith("SleepingCpuWorker")

    async def find_memory_calls(self) -> None:
        """Find out whether the workers have our extension."""
        try:
            await self.collective_rpc(MEMORY_METHOD, (), {})
        except TurnoutError as error:
            if error.reason == "ENGINE_DEAD":
                raise
        else:
            self.offers |= {calls.MEMORY}

    # ---------------------------------------------------------------------------------------------------------- reads

    async def check(self) -> None:
        if self.engine.errored:
            raise engine_dead("the engine core has died")

    async def unfinished(self) -> int:
        return int(self.engine.get_num_unfinished_requests())

    async def read(self, memory: bool = True) -> Reading:
        offers = self.offers
        asleep, paused, version, workers = await asyncio.gather(
            self._ask(self.engine.is_sleeping()),
            self._ask(self.engine.is_paused()) if calls.IS_PAUSED in offers else _nothing(),
            self._ask(self.engine.get_weight_version()) if calls.WEIGHT_VERSION in offers else _nothing(),
            self.collective_rpc(MEMORY_METHOD, (), {}) if memory and calls.MEMORY in offers else _nothing(),
        )
        used, tagged = (None, None) if workers is None else read_memory(workers)
        return Reading(
            asleep=asleep,
            paused=paused,
            unfinished=await self.unfinished(),
            weight_version=version,
            memory_bytes=used,
            tagged_bytes=tagged,
        )

    # -------------------------------------------------------------------------------------------------------- commands

    async def sleep(self, level: int, mode: str) -> None:
        mode_too = {"mode": mode} if calls.SLEEP_MODE in self.offers else {}
        await self._ask(self.engine.sleep(level=level, **mode_too))

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self._ask(self.engine.wake_up(tags=None if tags is None else list(tags)))

    async def release_kv_cache(self) -> None:
        await self._ask(self.engine.release_kv_cache_memory())

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._ask(self.engine.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._ask(self.engine.resume_generation())

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        named = {}
        if calls.RESET_RUNNING in self.offers:
            named["reset_running_requests"] = running
        if calls.RESET_CONNECTORS in self.offers:
            named["reset_connector"] = connectors
        # Before it returned a bool it returned None, and raised when it could not.
        return await self._ask(self.engine.reset_prefix_cache(**named)) is not False

    async def reset_mm_cache(self) -> None:
        await self._ask(self.engine.reset_mm_cache())

    async def reset_encoder_cache(self) -> None:
        await self._ask(self.engine.reset_encoder_cache())

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        answers = await self._ask(self.engine.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs)))
        return list(answers)

    # --------------------------------------------------------------------------------------------------------- weights

    async def reload_weights(self, path: str) -> None:
        await self.collective_rpc("reload_weights", (), {"weights_path": path})

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        await self._ask(self.engine.init_weight_transfer_engine(self._init_request(init_info=dict(info))))

    async def start_update(self) -> None:
        await self._ask(self.engine.start_weight_update())

    async def update_weights(self, info: Any) -> None:
        await self._ask(self.engine.update_weights(self._update_request(update_info=info)))

    async def finish_update(self) -> None:
        await self._ask(self.engine.finish_weight_update())

    async def set_version(self, version: str) -> None:
        await self._ask(self.engine.update_weight_version(version))

    # ------------------------------------------------------------------------------------------------------ generation

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._ask(self.engine.abort(list(self._live if request_ids is None else request_ids)))

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        params = self._params(
            max_tokens=draw.max_tokens,
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k,
            seed=draw.seed,
            stop_token_ids=list(draw.stop_token_ids),
            logprobs=0 if draw.logprobs else None,
            detokenize=False,
            output_kind=self._delta,
        )
        stream = self.engine.generate({"prompt_token_ids": list(prompt)}, params, request_id)
        self._live.add(request_id)
        try:
            async with aclosing(stream):
                async for output in stream:
                    yield self._read_output(output)
        except Exception as error:
            raise self._translate(error) from error
        finally:
            self._live.discard(request_id)

    @staticmethod
    def _read_output(output: Any) -> Tokens:
        completion = output.outputs[0]
        ids = completion.token_ids
        logprobs: Sequence[float] = ()
        if completion.logprobs is not None:
            logprobs = [at[token].logprob for token, at in zip(ids, completion.logprobs, strict=True)]
        finish = None
        if completion.finish_reason is not None:
            finish = FINISHES.get(completion.finish_reason)
            if finish is None:
                raise unavailable("ENGINE_FAILED", f"vLLM ended a request with {completion.finish_reason!r}")
        return Tokens(ids, logprobs, finish, output.num_cached_tokens or 0, _prefill_seconds(output.metrics))

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.shutdown, SHUTDOWN_S)

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> TurnoutError:
        if isinstance(error, TurnoutError):
            return error
        # vLLM raises a bare Exception for what fails in its core; only its type for a dead one says more.
        if self.engine.errored or type(error).__name__ == "EngineDeadError":
            return engine_dead("the engine core has died")
        # Its own kind of refusal has been a ValueError, and is not any more.
        refused = any(parent.__name__ in ("ValueError", "VLLMClientError") for parent in type(error).__mro__)
        if refused:
            return invalid_argument("request", f"vLLM refuses: {describe(error)[:500]}", reason="ENGINE_REFUSED")
        return aborted("ENGINE_FAILED", f"vLLM failed: {describe(error)[:500]}")


def _prefill_seconds(stats: Any) -> float:
    scheduled = float(getattr(stats, "scheduled_ts", 0.0))
    first_token = float(getattr(stats, "first_token_ts", 0.0))
    return max(0.0, first_token - scheduled) if scheduled and first_token else 0.0


async def _nothing() -> None:
    return None
