"""The requests that one engine has, as the controller forwarded them.

Invariant: whoever waits for the last of them to leave is told when it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol


class Forward(Protocol):
    """A request that was forwarded to the engine."""

    @property
    def engine_id(self) -> str:
        """Its id in the engine."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def output_tokens(self) -> int:
        """Tokens of output that have come out of engines so far."""
        ...

    def interrupt(self) -> None:
        """Stop waiting for the engine; the request goes on elsewhere."""
        ...


class Forwards:
    """Those of one replica; true while there are any."""

    def __init__(self) -> None:
        self._present: set[Forward] = set()
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Forward]:
        return iter(list(self._present))

    def enter(self, forward: Forward) -> None:
        """A request is forwarded to the engine."""
        self._present.add(forward)

    def leave(self, forward: Forward) -> None:
        """It has ended there."""
        self._present.discard(forward)
        if not self._present:
            self._emptied.set()

    async def emptied(self, timeout: float) -> None:
        """Wait until no request is in the engine, at most `timeout` wall seconds."""
        if not self._present:
            return
        self._emptied.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._emptied.wait()
        except TimeoutError:
            return

    def interrupt(self) -> None:
        """The engine does not answer: all of them go on elsewhere."""
        for forward in self:
            forward.interrupt()
