"""One request for output, as the controller sees it.

Invariants: a request is valid or refused with INVALID_ARGUMENT naming the field; the lengths of the segments add up
to the output; the output only grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import google_crc32c
import numpy as np

from services.engine.domain.tokens import Stretches
from services.runtime.errors import invalid_argument, require_finite, require_id, require_non_negative

MAX_TOKENS: Final = 1 << 24
"""Longest output and prompt in tokens: a thousand times today's, and far from what a message can hold."""


class Finish(Enum):
    """Why an engine ended a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class JoinKey:
    """The buffer's trajectory a request belongs to."""

    partition: str = ""
    group_id: str = ""
    trajectory: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of tokens under one weight version."""

    tokens: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of output from one replica under one weight version; `weight_version` None if it has no tokens."""

    tokens: int
    weight_version: int | None
    replica_id: str
    continued: bool = False


@dataclass(slots=True)
class Generation:
    """A request and what exists of its output. `delta_interval` is in domain seconds."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    output: Stretches[int] = field(default_factory=Stretches)
    segments: list[Segment] = field(default_factory=list)
    logprobs: Stretches[float] = field(default_factory=Stretches)
    join_key: JoinKey | None = None
    session_id: str = ""
    delta_tokens: int = 64
    delta_interval: float = 0.5
    pinned_to: str = ""

    def validate(self) -> None:
        """Refuse what can never be right."""
        require_id("request_id", self.request_id)
        if self.session_id:
            require_id("session_id", self.session_id)
        if not self.prompt:
            raise invalid_argument("prompt_token_ids", "a prompt has at least one token")
        if not 1 <= self.max_tokens <= MAX_TOKENS:
            raise invalid_argument("max_tokens", f"a budget is 1 to {MAX_TOKENS} tokens", value=self.max_tokens)
        named = [("prompt_token_ids", self.prompt), *(("output_token_ids", part) for part in self.output.since())]
        for name, tokens in named:
            least = int(np.array(tokens).min())
            if least < 0:
                raise invalid_argument(name, "token ids are not negative", value=least)
        for segment in self.segments:
            require_non_negative("output_segments.tokens", segment.tokens)
        if sum(segment.tokens for segment in self.segments) != len(self.output):
            raise invalid_argument(
                "output_segments", f"the segments must add up to the {len(self.output)} tokens of output so far"
            )
        require_non_negative("delta_tokens", self.delta_tokens)
        require_non_negative("delta_interval", self.delta_interval)
        _check_sampling(self.sampling)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """New output came."""
        self.output.append(tokens)
        self.logprobs.append(logprobs)

    def close_stretch(self, replica_id: str, spans: Sequence[Span], continued: bool) -> None:
        """A stay on a replica is over; `spans` cover its tokens, in order."""
        kept = [span for span in spans if span.tokens]
        for position, span in enumerate(kept):
            more = continued or position < len(kept) - 1
            self.segments.append(Segment(span.tokens, span.weight_version, replica_id, more))


def default_seed(request_id: str) -> int:
    """The seed of a request that has none: the same wherever it is continued, another for every request."""
    return int(google_crc32c.value(request_id.encode()))


def _check_sampling(sampling: Sampling) -> None:
    require_non_negative("sampling.temperature", require_finite("sampling.temperature", sampling.temperature))
    if math.isnan(sampling.top_p) or not 0 < sampling.top_p <= 1:
        raise invalid_argument("sampling.top_p", "top_p lies in (0, 1]", value=sampling.top_p)
    require_non_negative("sampling.top_k", sampling.top_k)
