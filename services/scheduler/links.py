"""The way to the run's replay buffer and engine controller.

Invariants: an error of a peer becomes an error of ours, that of a silent peer UNAVAILABLE naming it; loopback and Unix
sockets are reached directly, whatever proxy the environment names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from services.runtime.errors import Code, TurnoutError, invalid_argument, unavailable
from services.runtime.peers import Dialer
from services.runtime.statuses import from_rpc_error
from turnout.channels import proxy_variable

_LAST_CALLS_S: Final = 5.0
"""Wall seconds for reads that nobody's run needs any more, such as that of a list of metrics, before they are cut."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way to one peer, as stubs use it.

    Parked streams have a connection of their own, so that they never stand in the way of the call that releases them.
    """

    control: grpc.aio.Channel
    parked: grpc.aio.Channel


class Links:
    """One link per target, shared by all runs."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._links: dict[str, Link] = {}
        self._channels: dict[str, tuple[grpc.aio.Channel, ...]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, field: str, target: str) -> Link:
        """The link to `target`. An empty target is INVALID_ARGUMENT naming `field`."""
        if not target:
            raise invalid_argument(field, f"{field} must not be empty", value=target)
        if target not in self._links:
            control, parked = (self._dialer.open(target) for _ in range(2))
            self._channels[target] = (control.channel, parked.channel)
            self._links[target] = Link(control.stubs, parked.stubs)
        return self._links[target]

    def keep(self, targets: Collection[str]) -> None:
        """Let go of all but those to `targets`: an OpenRun may name anything, and a connection tries for ever."""
        for target in self._links.keys() - set(targets):
            del self._links[target]
            for channel in self._channels.pop(target):
                task = asyncio.get_running_loop().create_task(channel.close(_LAST_CALLS_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close them all."""
        self.keep(())
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def errors_of(reason: str, target: str) -> AsyncIterator[None]:
    """Turn what a stub raises into our errors; `reason` is that of a peer that does not answer."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _translated(from_rpc_error(error), reason, target) from error


def _translated(error: TurnoutError, reason: str, target: str) -> TurnoutError:
    # A status without our ErrorInfo has its code as reason: the transport speaks, not the peer.
    silent = error.reason == error.code.name
    if silent and error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNKNOWN, Code.CANCELLED):
        peer = reason.partition("_")[0].lower()
        message = f"the {peer} at {target} did not answer: {error.message}"
        metadata = {"target": target, "code": error.code.name}
        variable = proxy_variable(target, os.environ)
        if variable is not None:
            message += f" (the environment's {variable} sends this through a proxy)"
            metadata["proxy_variable"] = variable
        return unavailable(reason, message, **metadata)
    return error


def unanswered(error: TurnoutError) -> bool:
    """Whether `error` says that a peer could not be reached or is stopping: to be tried again."""
    return error.code is Code.UNAVAILABLE


async def stream_of(begin: Callable[[], Any], reason: str, target: str) -> AsyncGenerator[Any, None]:
    """The messages of the call that `begin` makes; closing the generator ends it."""
    call = begin()
    try:
        async with errors_of(reason, target):
            async for message in call:
                yield message
    finally:
        call.cancel()
