"""What the clients of all three services share.

Invariant: a client has one link, one policy and one source of randomness for all its calls, waits and watches.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from turnout.client._async_link import AsyncLink
from turnout.client._blocking_link import BlockingLink
from turnout.client._calls import CallChannel, CallPolicy, seconds
from turnout.client._errors import TurnoutError, is_retryable
from turnout.client._link import Link, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._refills import PaysRefills
from turnout.client._retry import Attempts
from turnout.client._waits import Arm, Meanwhile, ProgressFn, follow, hold

T = TypeVar("T")


class AsyncClient:
    """An asyncio client of one service at one target. It opens nothing until its first call."""

    def __init__(
        self,
        target: str,
        options: ClientOptions | None = None,
        *,
        rng: random.Random | None = None,
        link: Link | None = None,
    ) -> None:
        """`target` is a gRPC target: host:port, unix:path. `rng` spreads retries; `link` replaces the network."""
        self.target = target
        self.options = options or ClientOptions()
        self.link: Link = link or AsyncLink(target, self.options)
        self._policy = CallPolicy(self.link, self.options, rng or random.Random())
        self._channel = CallChannel(self._policy)

    async def close(self) -> None:
        """Close the connections. Calls at work end."""
        await self.link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _upload(self, send: Callable[[float], Awaitable[T]]) -> T:
        """Send all of something, again from the start if the service goes away meanwhile; `send` gets the timeout."""
        link, times = self.link, self.options.timeouts
        attempts = Attempts(
            self.options.retry, self._policy.rng, now=link.now(), total=times.transfer, attempt=times.transfer
        )
        while True:
            try:
                return await send(attempts.timeout(link.now()))
            except TurnoutError as error:
                pause = attempts.pause(link.now(), error.retry_after) if is_retryable(error) else None
                if pause is None:
                    raise
            await link.sleep(pause)

    async def _hold(
        self,
        call: Callable[..., Any],
        arm: Arm,
        request: Any,
        *,
        again: Callable[[Any], bool],
        refills: PaysRefills | None,
        on_progress: ProgressFn | None,
        on_groups: Callable[[Any], None] | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Any:
        """Hold a wait until its final event; refills are paid at the step of the request, from inside the wait."""

        async def on_event(name: str, event: Any) -> None:
            if name == "groups" and on_groups is not None:
                on_groups(event)
            elif name == "refill_due" and refills is not None:
                await refills.pay(event, request.step)
            elif name == "progress" and on_progress is not None:
                await self.link.invoke(on_progress, event)

        return await hold(
            self._policy,
            call,
            arm,
            max_wait=seconds(request.max_wait) if request.HasField("max_wait") else None,
            again=again,
            on_event=on_event,
            meanwhile=meanwhile,
        )

    def _follow(self, call: Callable[..., Any], arm: Callable[[], Any]) -> AsyncGenerator[Any, None]:
        return follow(self._policy, call, arm)


class Client:
    """A blocking client of one service at one target. It opens nothing until its first call; any thread may use it."""

    def __init__(self, target: str, options: ClientOptions | None = None, *, rng: random.Random | None = None) -> None:
        """`target` is a gRPC target: host:port, unix:path. `rng` spreads retries."""
        self.target = target
        self.options = options or ClientOptions()
        self.link = BlockingLink(target, self.options)
        self._policy = CallPolicy(self.link, self.options, rng or random.Random())

    def close(self) -> None:
        """Close the connections. Calls at work end."""
        run_blocking(self.link.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
