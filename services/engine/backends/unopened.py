"""In place of an engine that could not be opened again yet after a restart of the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from services.engine.backends.base import Backend
from services.runtime.errors import TurnoutError, unavailable


class _Unopened:
    """Answers every call with UNAVAILABLE / ENGINE_UNREACHABLE."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def refuse(*args: object, **named: object) -> None:
            raise self._refusal()

        return refuse

    def generate(self, request: object) -> None:
        raise self._refusal()

    async def close(self) -> None:
        return

    def _refusal(self) -> TurnoutError:
        why = f"the engine of {self._replica_id} could not be opened since the controller started"
        return unavailable("ENGINE_UNREACHABLE", why, replica_id=self._replica_id)


def unopened(replica_id: str) -> Backend:
    """A backend that can only be closed."""
    return cast(Backend, _Unopened(replica_id))
