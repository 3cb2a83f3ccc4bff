"""What an actor in these tests starts in place of vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from services.engine.domain.requests import Finish
from services.engine.guarded.surface import Draw, Tokens
from tests.engine.guarded.fake import FakeSurface

STARTER = "tests.cluster.engines:start"
BROKEN = "tests.cluster.engines:start_nothing"


class ScriptedEngine(FakeSurface):
    """Generates numbers until it has enough; `collective_rpc` breaks it on command."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = str(os.getpid())
        self.aborted: set[str] = set()

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await super().abort(request_ids)
        self.aborted |= set(request_ids or ())

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        for token in range(draw.max_tokens):
            await asyncio.sleep(0.01)
            if request_id in self.aborted:
                yield Tokens((), (), Finish.ABORT)
                return
            yield Tokens([token], [-0.5], Finish.LENGTH if token + 1 == draw.max_tokens else None)

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Any) -> list[Any]:
        if method == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if method == "hang":
            await asyncio.sleep(3600)
        if method == "aborted":
            return [sorted(self.aborted)]
        return [os.getpid()]


async def start(configuration: dict[str, Any]) -> ScriptedEngine:
    """The engine; the configuration is not looked at."""
    assert configuration["model"] == "m"
    return ScriptedEngine()


async def start_nothing(configuration: dict[str, Any]) -> ScriptedEngine:
    """An engine that does not start."""
    raise RuntimeError("no memory left")
