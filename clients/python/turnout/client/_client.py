"""What the clients of all three services share."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self

from turnout.client._calls import CallChannel, CallPolicy
from turnout.client._link import AsyncLink, BlockingLink, Link, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._waits import follow


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
