"""Ray actors by name, and what their failures mean here.

Invariants: Ray is imported and joined at the first use; a cluster is joined and never started; every call of an actor
that is dead raises UNAVAILABLE / ENGINE_DEAD; an exception inside an actor comes out as the one that was raised there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from services.engine.backends.base import engine_dead
from services.runtime.errors import failed_precondition, invalid_argument, unavailable


class Cluster:
    """The Ray cluster that this process takes part in. `address` empty: the one of its surroundings."""

    def __init__(self, address: str) -> None:
        self._address = address or "auto"
        self._lock = asyncio.Lock()

    async def join(self) -> Any:
        """Join it if that has not happened; returns the module `ray`."""
        if importlib.util.find_spec("ray") is None:
            raise failed_precondition("RAY_MISSING", "ray is not installed beside this service")
        import ray

        async with self._lock:
            if not ray.is_initialized():
                try:
                    await asyncio.to_thread(ray.init, self._address, log_to_driver=False, logging_level="warning")
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise unavailable("RAY_UNREACHABLE", f"no Ray cluster at {self._address}: {error}"[:500]) from error
        return ray

    async def find(self, place: str) -> Actor:
        """The actor NAME or NAMESPACE/NAME; UNAVAILABLE / ENGINE_UNREACHABLE if there is none."""
        namespace, _, name = place.rpartition("/")
        if not name:
            raise invalid_argument("spec.endpoint", "needs an actor, as NAME or NAMESPACE/NAME", value=place)
        ray = await self.join()
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, namespace or None)
        except ValueError as error:
            raise unavailable("ENGINE_UNREACHABLE", f"there is no Ray actor {place!r}") from error
        return Actor(place, handle)


class Actor:
    """One actor."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle

    def has(self, method: str) -> bool:
        """Whether its class has this method."""
        return hasattr(self.handle, method)

    async def call(self, method: str, /, *args: Any, **named: Any) -> Any:
        """Call a method and wait for it, for as long as it takes. Raises what it raises."""
        with self._translated():
            return await getattr(self.handle, method).remote(*args, **named)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """What a generator of the actor yields."""
        with self._translated():
            references = getattr(self.handle, method).options(num_returns="streaming").remote(*args)
            async for reference in references:
                yield await reference

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        import ray.exceptions as faults

        try:
            yield
        except faults.ActorUnavailableError as error:
            raise unavailable("ENGINE_UNREACHABLE", f"the actor {self.name} cannot be reached for now") from error
        except faults.RayActorError as error:
            raise engine_dead(f"the actor {self.name} is dead") from error
        except faults.RayTaskError as error:
            # Ray's own error keeps a long traceback and is of two types at once; the cause is what was raised.
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
