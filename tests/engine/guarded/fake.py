"""An engine behind a surface that does what a test tells it, with the habits of vLLM that matter to a backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from services.engine.backends.base import engine_dead
from services.engine.domain.requests import Finish
from services.engine.domain.spec import ReplicaSpec, Role
from services.engine.guarded import surface as calls
from services.engine.guarded.backend import GuardedBackend
from services.engine.guarded.residency import TAGS
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.engine.vllm.async_llm import METHODS
from services.runtime.clock import MonotonicClock
from services.runtime.errors import aborted, unavailable

EVERYTHING = frozenset(METHODS) | {calls.MEMORY}


class FakeSurface:
    """Remembers its calls; `fail` and `hang` name calls that do so, `cut` those whose answers are lost."""

    vocabulary: int | None = 1000
    longest: int | None = 100
    text_only = True
    tags = TAGS
    schedules_when_awake = True
    incarnation = "fake"

    def __init__(self, offers: frozenset[str] = EVERYTHING) -> None:
        self.offers = offers
        self.calls: list[str] = []
        self.fail: set[str] = set()
        self.cut: set[str] = set()
        self.hang: dict[str, asyncio.Event] = {}
        self.dead = False
        self.asleep: set[str] = set()
        self.paused = False
        self.level: int | None = None
        self.version: str | None = "default"
        self.frees = True
        self.queued = 0
        self.reset_answers: list[bool] = []
        self.prompts: list[list[int]] = []
        self.draws: list[Draw] = []
        self.script: list[Tokens | Exception] = []
        self.infos: list[Any] = []
        self.given = asyncio.Event()
        self.held = asyncio.Event()
        self.held.set()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.hang:
            await self.hang[name.split()[0]].wait()
        if name.split()[0] in self.fail:
            raise aborted("ENGINE_FAILED", "it was told to fail")
        if name.split()[0] in self.cut:
            raise unavailable("ENGINE_UNREACHABLE", "its connection broke")

    async def check(self) -> None:
        if self.dead:
            raise engine_dead("it was told to die")

    async def read(self, memory: bool = True) -> Reading:
        used = 100 + (0 if "weights" in self.asleep else 400) + (0 if "kv_cache" in self.asleep else 500)
        return Reading(
            asleep=self.paused or bool(self.asleep),
            paused=self.paused,
            unfinished=self.queued,
            weight_version=self.version,
            memory_bytes=None if not memory else used if self.frees else 1000,
            tagged_bytes={
                "weights": 0 if "weights" in self.asleep else 400,
                "kv_cache": 0 if "kv_cache" in self.asleep else 500,
            }
            if memory
            else None,
        )

    async def unfinished(self) -> int:
        return self.queued

    async def sleep(self, level: int, mode: str) -> None:
        await self._call(f"sleep {level} {mode}")
        self.paused = True
        if "weights" not in self.asleep:
            self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self._call(f"wake_up {'all' if tags is None else ','.join(tags)}")
        if tags is not None and not set(tags) <= self.asleep:
            return
        self.asleep -= self.asleep if tags is None else set(tags)
        if not self.asleep:
            self.paused = False

    async def release_kv_cache(self) -> None:
        self.asleep.add("kv_cache")
        await self._call("release_kv_cache")

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._call(f"pause {mode}")
        self.paused = True

    async def resume(self) -> None:
        await self._call("resume")
        assert not self.asleep, "vLLM would die of the next request"
        self.paused = False

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        await self._call(f"reset_prefix_cache {running} {connectors}")
        return self.reset_answers.pop(0) if self.reset_answers else True

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        await self._call(f"collective_rpc {method}")
        self.infos.append(dict(kwargs))
        return [None]

    async def reload_weights(self, path: str) -> None:
        await self.collective_rpc("reload_weights", (), {"weights_path": path})

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        await self._call("init_transfer")

    async def start_update(self) -> None:
        await self._call("start_update")

    async def update_weights(self, info: Any) -> None:
        self.infos.append(info)
        await self._call("update_weights")

    async def finish_update(self) -> None:
        await self._call("finish_update")

    async def set_version(self, version: str) -> None:
        await self._call(f"set_version {version}")
        self.version = version

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._call(f"abort {'all' if request_ids is None else ','.join(request_ids)}")

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        self.prompts.append(list(prompt))
        self.draws.append(draw)
        self.given.set()
        for step in self.script or [Tokens([1, 2], finish=Finish.STOP)]:
            await self.held.wait()
            if isinstance(step, Exception):
                raise step
            yield step

    async def close(self) -> None:
        self.calls.append("close")


def backend_on(surface: FakeSurface, spool: str | None = None, **fields: Any) -> GuardedBackend:
    """A backend over a fake engine."""
    return GuardedBackend(ReplicaSpec("r", Role.HYBRID, "vllm-inproc", **fields), surface, MonotonicClock(), spool)
