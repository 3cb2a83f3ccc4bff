"""verl's server actor with the rules of verl 0.9.1, over an engine with the signatures of a vLLM."""

from __future__ import annotations

import asyncio
import enum
from types import SimpleNamespace
from typing import Any, cast

from services.engine.cluster.actors import Actor
from services.engine.cluster.verl import METHODS
from tests.verl.balancer import CONTRACT


class Mode(enum.Enum):
    HYBRID = "hybrid"
    STANDALONE = "standalone"


class OldEngine:
    """vLLM before 0.32: `pause_generation` has what verl gives."""

    def __init__(self) -> None:
        self.errored = False
        self.asleep: set[str] = set()
        self.paused = False
        self.output_processor = SimpleNamespace(request_states={})
        self.fail = ""
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail == name:
            raise RuntimeError("Call to x method failed: it was told to fail")

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        self._call("pause_generation")
        self.paused = True
        for finished in self.output_processor.request_states.values():
            finished.set()
        self.output_processor.request_states.clear()

    async def resume_generation(self) -> None:
        self._call("resume_generation")
        assert not self.asleep, "the next request would kill vLLM"
        self.paused = False

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._call("sleep")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._call("wake_up")
        assert tags is None or set(tags) <= self.asleep, "vLLM would do nothing, without a word"
        self.asleep -= set(tags or self.asleep)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._call("reset_prefix_cache")
        return True

    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...


class NewEngine(OldEngine):
    """vLLM 0.32: `wait_for_inflight_requests` is gone."""

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:  # type: ignore[override]
        raise AssertionError("verl cannot call this")


class VerlServer:
    """`vLLMHttpServer`."""

    def __init__(self, mode: Mode = Mode.HYBRID, engine: OldEngine | None = None, frees: bool = True) -> None:
        self.engine = engine or OldEngine()
        self.rollout_mode = mode
        self.node_rank = 0
        self.config = SimpleNamespace(free_cache_engine=frees, max_model_len=64)
        self.global_steps: int | None = None
        self.reply_error = ""
        self._submission_paused = self._rejecting = False
        self.rejecting_at_pause: bool | None = None

    def _resolve_sleep_level(self) -> int:
        return 2

    def get_server_address(self) -> tuple[str, int]:
        return "10.0.0.1", 80

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        if self.reply_error:
            return {"aborted_count": 0, "request_ids": [], "error": self.reply_error}
        self._submission_paused, self._rejecting = True, reject_request
        self.rejecting_at_pause = reject_request
        ids = list(self.engine.output_processor.request_states)
        await self.engine.pause_generation(wait_for_inflight_requests=False, clear_cache=reset_prefix_cache)
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        await self.engine.resume_generation()
        self._rejecting = self._submission_paused = False

    async def sleep(self) -> None:
        if not self.config.free_cache_engine or self.rollout_mode is not Mode.HYBRID:
            return
        await self.engine.sleep(level=self._resolve_sleep_level())

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self.rollout_mode is Mode.HYBRID:
            await self.engine.wake_up(tags=tags or ["kv_cache", "weights"])
            await self.engine.reset_prefix_cache(reset_connector=True)

    async def release_kv_cache(self) -> None:
        if self.config.free_cache_engine:
            await self.engine.sleep(level=self._resolve_sleep_level())
            await self.engine.wake_up(tags=["weights"])

    async def resume_kv_cache(self) -> None:
        if self.config.free_cache_engine:
            await self.engine.wake_up(tags=["kv_cache"])
            await self.engine.reset_prefix_cache(reset_connector=True)

    async def clear_kv_cache(self) -> None:
        await self.engine.reset_prefix_cache(reset_connector=True)

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        self.engine.calls.append(f"{method} {args} {kwargs}")

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        finished = self.engine.output_processor.request_states.pop(request_id, None)
        if finished is None:
            return {"aborted": False, "error": f"Request {request_id} not found"}
        if self.reply_error:
            return {"aborted": False, "request_id": request_id, "error": self.reply_error}
        finished.set()
        return {"aborted": True, "request_id": request_id}

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        if self._submission_paused and self._rejecting:
            return self._output([], "aborted")
        count = sampling_params["max_tokens"]
        if prompt_ids != [99]:
            return self._output(list(range(count)), "completed")
        aborted = self.engine.output_processor.request_states[request_id] = asyncio.Event()
        await aborted.wait()
        return self._output([7], "aborted")

    def _output(self, ids: list[int], reason: str) -> Any:
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": None},
        )


class ServerActor:
    """A server as an actor; every call must be one that verl's class takes."""

    def __init__(self, server: VerlServer) -> None:
        self.name = "vllm_server_0_0"
        self.server = server

    def has(self, method: str) -> bool:
        return hasattr(self.server, method)

    async def call(self, method: str, /, *args: Any, **named: Any) -> Any:
        if method == "__ray_call__":
            return args[0](self.server, *args[1:])
        known = CONTRACT["classes"]["vLLMHttpServer"]["methods"][method]
        assert named.keys() <= set(known["parameters"])
        assert set(known["required"]) <= named.keys()
        assert named.keys() <= set(METHODS[method])
        result = getattr(self.server, method)(**named)
        return await result if asyncio.iscoroutine(result) else result

    def as_actor(self) -> Actor:
        return cast(Actor, self)
