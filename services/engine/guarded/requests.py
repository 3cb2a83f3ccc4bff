"""The requests inside an engine, as far as they came through here.

Invariants: an id is live once, since one abort ends all requests of an id; no token outside the vocabulary reaches the
engine, which would die of it; tokens that came are given on before the error that ended them; every token is
attributed to the version that was loaded when it came out; an abort ends also a request that it overtook.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.engine.backends.base import EngineOutput, EngineProgress, EngineRequest
from services.engine.domain.requests import Finish
from services.engine.guarded.surface import Draw, Surface, Tokens
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError, already_exists, invalid_argument

SEED_STEP: Final = 0x9E3779B1
"""The golden ratio of 2^32: continuations of one request draw from streams that have nothing in common."""


@dataclass(slots=True)
class Live:
    """One request; `tokens` counts all of its output, `fresh` what was not given on yet."""

    tokens: int
    first_token: bool = False
    unwanted: bool = False
    """It was aborted before anything came of it: maybe before it reached the engine, which forgets such an abort."""
    fresh_ids: list[int] = field(default_factory=list)
    fresh_logprobs: list[float] = field(default_factory=list)

    def take(self, version: int, finish: Finish | None = None) -> EngineOutput:
        """What was not given on yet."""
        output = EngineOutput(self.fresh_ids, self.fresh_logprobs, version, finish)
        self.fresh_ids, self.fresh_logprobs = [], []
        return output


class Requests:
    """All live requests of one engine, and its counters."""

    def __init__(self, name: str, surface: Surface, clock: Clock) -> None:
        self._name = name
        self._surface = surface
        self._clock = clock
        self._live: dict[str, Live] = {}
        self._decoded = self._prefilled = 0
        self._prefill_seconds = 0.0

    @property
    def live(self) -> int:
        """How many requests are live."""
        return len(self._live)

    def progress(self, held: bool) -> EngineProgress:
        """How far they are; `held`: the engine schedules nothing."""
        running = sum(one.first_token for one in self._live.values())
        return EngineProgress(
            output_tokens={request_id: one.tokens for request_id, one in self._live.items()},
            decoded_tokens=self._decoded,
            prefilled_tokens=self._prefilled,
            prefill_seconds=self._prefill_seconds,
            running=0 if held else running,
            waiting=len(self._live) - (0 if held else running),
        )

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests; ids that are not live are fine and never reach the engine."""
        known = list(self._live if request_ids is None else self._live.keys() & set(request_ids))
        for live in (self._live[request_id] for request_id in known):
            live.unwanted = not live.first_token
        if request_ids is None:
            await self._surface.abort(None)
        elif known:
            await self._surface.abort(known)

    def run(self, request: EngineRequest, version: Callable[[], int]) -> AsyncGenerator[EngineOutput, None]:
        """Have the engine go on with a request; refused at once if it must not reach the engine."""
        self._check(request)
        live = Live(len(request.output))
        self._live[request.request_id] = live
        return self._stream(request, live, version)

    async def _stream(
        self, request: EngineRequest, live: Live, version: Callable[[], int]
    ) -> AsyncGenerator[EngineOutput, None]:
        try:
            done = self._done_already(request)
            if done is not None:
                yield EngineOutput((), (), None, done)
                return
            prompt = [*request.prompt, *(token for part in request.output.since() for token in part)]
            made_under = version()
            given_at = self._clock.now()
            try:
                async with aclosing(self._surface.generate(request.request_id, prompt, _draw(request))) as outputs:
                    async for tokens in outputs:
                        now_under = version()
                        if now_under != made_under:
                            if live.fresh_ids:
                                yield live.take(made_under)
                            made_under = now_under
                        self._count(live, tokens, len(prompt))
                        finish = tokens.finish or (Finish.ABORT if live.unwanted else None)
                        if finish is not None:
                            yield live.take(made_under, finish)
                            return
                        if self._due(request, live, given_at):
                            given_at = self._clock.now()
                            yield live.take(made_under)
            except TurnoutError:
                if live.fresh_ids:
                    yield live.take(made_under)
                raise
        finally:
            del self._live[request.request_id]

    def _due(self, request: EngineRequest, live: Live, given_at: float) -> bool:
        return (
            request.delta_tokens > 0
            and len(live.fresh_ids) >= request.delta_tokens
            and self._clock.now() - given_at >= request.delta_interval
        )

    def _count(self, live: Live, tokens: Tokens, prompt_tokens: int) -> None:
        if tokens.token_ids and not live.first_token:
            live.first_token = True
            self._prefilled += max(0, prompt_tokens - tokens.cached_tokens)
            self._prefill_seconds += tokens.prefill_seconds / self._clock.scale
        live.tokens += len(tokens.token_ids)
        self._decoded += len(tokens.token_ids)
        live.fresh_ids += tokens.token_ids
        live.fresh_logprobs += tokens.logprobs

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self._live:
            raise already_exists(
                "REQUEST_LIVE", f"request {request.request_id!r} is live in {self._name}", request_id=request.request_id
            )
        vocabulary = self._surface.vocabulary
        if vocabulary is None:
            return
        named = [("prompt_token_ids", request.prompt), ("sampling.stop_token_ids", request.sampling.stop_token_ids)]
        named += [("output_token_ids", part) for part in request.output.since()]
        for name, ids in named:
            if not len(ids):
                continue
            array = np.asarray(ids)
            wrong = array[(array < 0) | (array >= vocabulary)]
            if wrong.size:
                raise invalid_argument(
                    name,
                    f"{self._name} has {vocabulary} token ids",
                    value=int(wrong[0]),
                    reason="TOKEN_OUT_OF_VOCABULARY",
                )

    def _done_already(self, request: EngineRequest) -> Finish | None:
        """A request continued at its budget, or at the longest that the engine takes, ends as it would have there."""
        longest = self._surface.longest
        length = len(request.prompt) + len(request.output)
        full = longest is not None and len(request.output) > 0 and length >= longest
        return Finish.LENGTH if full or len(request.output) >= request.max_tokens else None


def _draw(request: EngineRequest) -> Draw:
    sampling, done = request.sampling, len(request.output)
    # A seed costs: vLLM keeps a generator for each request that has one, and on a GPU draws for them one by one.
    drawn = sampling.temperature and not sampling.seed_is_default
    seed = (sampling.seed + SEED_STEP * done) % 2**31 if drawn else None
    return Draw(
        max_tokens=request.max_tokens - done,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
    )
