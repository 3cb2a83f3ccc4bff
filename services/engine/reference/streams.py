"""One request inside the reference engine, between the decode clock and whoever reads its output.

Invariants: a stream ends exactly once, with an output that has a finish or with an error; the spans of its last
output cover all its tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from services.engine.backends.base import EngineOutput, EngineRequest
from services.engine.domain.requests import Finish
from services.engine.reference.model import Script
from services.runtime.errors import TurnoutError


class Stream:
    """Where the tokens of one request go. Token counts are those since the request came to this engine."""

    def __init__(self, request: EngineRequest, script: Script) -> None:
        self.request = request
        self.script = script
        self.given = 0
        self._stretches: list[tuple[int, int, bool]] = []
        self._ready: deque[Callable[[], EngineOutput]] = deque()
        self._error: TurnoutError | None = None
        self._wake = asyncio.Event()
        self.ended = False

    @property
    def wanted(self) -> int:
        """Tokens still to decode."""
        return max(0, self.script.length - len(self.request.output))

    def weights_changed(self, tokens: int, version: int, garbage: bool) -> None:
        """All tokens up to `tokens` were made under `version`; the following are made under another."""
        self._stretches.append((tokens, version, garbage))

    def give(self, tokens: int, version: int, garbage: bool, finish: Finish | None = None) -> None:
        """`tokens` exist now; hand out those that were not yet, one output for each version."""
        parts = [*self._stretches, (tokens, version, garbage)]
        self._stretches.clear()
        offset = len(self.request.output)
        for position, (stop, made_under, spoiled) in enumerate(parts):
            last = finish if position == len(parts) - 1 else None
            if stop == self.given and last is None:
                continue
            span = (offset + self.given, offset + stop, spoiled)
            self.given = stop
            self._ready.append(partial(self._output, span, made_under, last))
        self.ended = finish is not None
        self._wake.set()

    def fail(self, error: TurnoutError) -> None:
        """The engine is gone."""
        self._error = error
        self.ended = True
        self._wake.set()

    async def next(self) -> EngineOutput:
        """The next output, or the error the stream ended with."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        # Made when it is read: thousands of outputs that end together must not hold the loop before the first leaves.
        return self._ready.popleft()()

    def _output(self, span: tuple[int, int, bool], made_under: int, finish: Finish | None) -> EngineOutput:
        ids = self.script.tokens(*span).tolist()
        logprobs = self.script.logprobs(*span).tolist() if self.request.sampling.logprobs else ()
        return EngineOutput(ids, logprobs, made_under, finish)
