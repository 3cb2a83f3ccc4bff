"""One request for output, as the controller sees it.

Invariants: a request is valid or refused with INVALID_ARGUMENT naming the field; the lengths of the segments add up
to the output; the output only grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """How tokens are drawn. `seed_is_default`: nobody asked for the seed, so an engine may draw as it likes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    seed_is_default: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of output from one replica under one weight version; `weight_version` None if it has no tokens."""

    tokens: int
    weight_version: int | None
    replica_id: str
    continued: bool = False


@dataclass(slots=True)
class Piece:
    """Output of one segment that its caller has not got yet; `new_segment` if none of that segment came before."""

    replica_id: str
    weight_version: int
    new_segment: bool
    token_ids: list[Sequence[int]] = field(default_factory=list)
    logprobs: list[Sequence[float]] = field(default_factory=list)


@dataclass(slots=True)
class Generation:
    """A request and what exists of its output. `delta_interval` is in domain seconds."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    output: Stretches[int] = field(default_factory=Stretches)
    segments: list[Segment] = field(default_factory=list)
    join_key: JoinKey | None = None
    session_id: str = ""
    delta_tokens: int = 64
    delta_interval: float = 0.5
    pinned_to: str = ""
    _unsent: list[Piece] = field(default_factory=list)
    _segment_open: bool = False

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

    def append(self, replica_id: str, version: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Output came from a replica under a weight version."""
        if not tokens:
            return
        self.output.append(tokens)
        last = self.segments[-1] if self.segments else None
        if self._segment_open and last is not None and last.weight_version == version:
            self.segments[-1] = replace(last, tokens=last.tokens + len(tokens))
            begins = False
        else:
            if last is not None:
                self.segments[-1] = replace(last, continued=True)
            self.segments.append(Segment(len(tokens), version, replica_id))
            self._segment_open = begins = True
        if begins or not self._unsent:
            self._unsent.append(Piece(replica_id, version, begins))
        self._unsent[-1].token_ids.append(tokens)
        self._unsent[-1].logprobs.append(logprobs)

    @property
    def complete(self) -> Finish | None:
        """Why there is nothing left to generate; None if there is."""
        if len(self.output) >= self.max_tokens:
            return Finish.LENGTH
        last = self.output.since(self.output.count - 1) if self.output else []
        return Finish.STOP if last and last[0][-1] in self.sampling.stop_token_ids else None

    def leave(self) -> None:
        """The stay on a replica is over: what comes next is another segment."""
        self._segment_open = False

    def take(self) -> list[Piece]:
        """The output that was not taken yet, by segment."""
        unsent, self._unsent = self._unsent, []
        return unsent


def default_seed(request_id: str) -> int:
    """The seed of a request that has none: the same wherever it is continued, another for every request."""
    return int(google_crc32c.value(request_id.encode()))


def _check_sampling(sampling: Sampling) -> None:
    require_non_negative("sampling.temperature", require_finite("sampling.temperature", sampling.temperature))
    if math.isnan(sampling.top_p) or not 0 < sampling.top_p <= 1:
        raise invalid_argument("sampling.top_p", "top_p lies in (0, 1]", value=sampling.top_p)
    require_non_negative("sampling.top_k", sampling.top_k)
