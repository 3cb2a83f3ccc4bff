"""The class of the Ray actor that has an engine: the calls of a `Surface`, made from elsewhere.

Invariants: only plain values and our own frozen records travel; an error of ours travels as its fields, since Ray would
turn its class into another; the engine is started once, however often that is asked.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from services.engine.guarded.surface import Draw, Surface, Tokens
from services.runtime.errors import Code, TurnoutError, aborted, describe

STARTER: Final = "services.engine.cluster.starters:start_vllm"
"""What starts the engine: MODULE:FUNCTION, called with the configuration."""

Fault = tuple[str, str, str, dict[str, str]]
"""Code, reason, message and metadata of an error."""


def fault_of(error: Exception) -> Fault:
    """An error as plain values."""
    if not isinstance(error, TurnoutError):
        error = aborted("ENGINE_FAILED", f"the actor failed: {describe(error)[:500]}")
    return error.code.name, error.reason, error.message, error.metadata


def error_of(fault: Fault) -> TurnoutError:
    """The error again."""
    code, reason, message, metadata = fault
    return TurnoutError(Code[code], reason, message, metadata)


class EngineHost:
    """One engine."""

    def __init__(self, starter: str, configuration: str) -> None:
        self._starter = starter
        self._configuration = configuration
        self._starting: asyncio.Future[Surface] | None = None

    async def describe(self) -> tuple[dict[str, Any] | None, Fault | None]:
        """Start the engine if that has not happened, and tell what it is."""
        try:
            surface = await self._engine()
        except Exception as error:
            return None, fault_of(error)
        return {
            "offers": sorted(surface.offers),
            "vocabulary": surface.vocabulary,
            "longest": surface.longest,
            "text_only": surface.text_only,
            "incarnation": surface.incarnation,
            "tags": sorted(surface.tags),
            "schedules_when_awake": surface.schedules_when_awake,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }, None

    async def call(self, method: str, arguments: Sequence[Any]) -> tuple[Any, Fault | None]:
        """Make one call of the surface."""
        try:
            surface = await self._engine()
            work: Callable[..., Awaitable[Any]] = getattr(surface, method)
            return await work(*arguments), None
        except Exception as error:
            return None, fault_of(error)

    async def generate(
        self, request_id: str, prompt: Sequence[int], draw: Draw
    ) -> AsyncGenerator[tuple[Tokens | None, Fault | None], None]:
        """Stream one output; a fault is the last thing."""
        try:
            surface = await self._engine()
            async with aclosing(surface.generate(request_id, prompt, draw)) as stream:
                async for tokens in stream:
                    yield tokens, None
        except Exception as error:
            yield None, fault_of(error)

    async def _engine(self) -> Surface:
        if self._starting is None:
            module, _, function = self._starter.partition(":")
            start = getattr(importlib.import_module(module), function)
            self._starting = asyncio.ensure_future(start(json.loads(self._configuration)))
        try:
            return await asyncio.shield(self._starting)
        except Exception:
            self._starting = None
            raise
