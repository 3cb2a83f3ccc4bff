"""What the controller needs of an engine, whichever it is.

Invariants: a call returns only when the engine has confirmed it, and raises a TurnoutError otherwise: UNAVAILABLE /
ENGINE_DEAD if the engine is gone, and never OK for a reply that carries an error. Calls of one replica come one after
the other, except `probe`, `watch`, `abort`, `generate` and `progress`, which may come at any time and are never queued
behind the others. `timeout` is in wall seconds and tells the engine how long the caller will wait; the caller keeps its
own watch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.engine.domain.engine_state import EngineState
from services.engine.domain.operations import Shard
from services.engine.domain.requests import Finish, JoinKey, Sampling
from services.engine.domain.spec import Cache, PauseMode
from services.engine.domain.tokens import Stretches
from services.runtime.errors import TurnoutError, unavailable


def engine_dead(why: str) -> TurnoutError:
    """The engine's process is gone."""
    return unavailable("ENGINE_DEAD", why)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One output to generate.

    `output` is what exists of it already; `max_tokens` counts it in. The interval is in domain seconds.
    """

    request_id: str
    prompt: Sequence[int]
    output: Stretches[int]
    max_tokens: int
    sampling: Sampling
    join_key: JoinKey | None = None
    delta_tokens: int = 0
    delta_interval: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens under one weight version, None if the engine cannot tell. The last of a request has `finish`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    weight_version: int | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request that reached an engine by its trainer's own client, and says whose it is.

    `output_tokens` is all of the trajectory so far, `made_before` what of it came before this request.
    """

    request_id: str
    join_key: JoinKey
    prompt_tokens: int
    output_tokens: int
    made_before: int = 0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How far the requests of a replica are, and its counters since it started. `prefill_seconds` is domain time.

    `running` and `waiting` count `foreign` ones too, and those of which nothing is known.
    """

    output_tokens: Mapping[str, int] = field(default_factory=dict)
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    foreign: tuple[ForeignRequest, ...] = ()


Shards = tuple[Shard, ...]
"""What each shard answered; empty from an engine that has one or does not tell."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to a command; `state` is its own afterwards, None if only a probe tells it."""

    shards: Shards = ()
    state: EngineState | None = None


class Backend(Protocol):
    """One replica's engine."""

    async def probe(self) -> EngineState:
        """Read the engine's state. An engine that answers but hangs raises DEADLINE_EXCEEDED / ENGINE_UNRESPONSIVE."""
        ...

    async def watch(self) -> None:
        """Return at the first sign that the engine is gone, within half a second and at next to no cost.

        A probe tells whether it is; so whatever cannot be made out is a sign too.
        """
        ...

    async def sleep(self, level: int, timeout: float) -> Answer:
        """Free all memory that is still resident, also of an engine that is partly asleep."""
        ...

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        """Refill memory. An engine may start scheduling by itself once everything is resident."""
        ...

    async def release_kv_cache(self, timeout: float) -> Answer:
        """Free KV memory alone; only called where the capability says so."""
        ...

    async def resume_kv_cache(self, timeout: float) -> Answer:
        """Refill KV memory."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        """Stop scheduling; with ABORT and WAIT nothing runs any more when it returns."""
        ...

    async def resume(self, timeout: float) -> Answer:
        """Start scheduling."""
        ...

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        """Empty caches. An engine that answers "false" raises FAILED_PRECONDITION / CACHE_BUSY."""
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests, None is all; their streams end with ABORT and the tokens so far. Unknown ids are fine."""
        ...

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        """Call a method on one shard or on all."""
        ...

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        """New weights will come, through `update_weights` or by the trainer's own means.

        The same id again goes on with that update and loses nothing that came: the controller says it once more after
        its own restart, when this object is new and the engine is in the middle of the update, or past its end.
        """
        ...

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        """Write weights. `timeout` bounds the time after the last chunk.

        `move_index`: which move of this update it is, from 0; the number of one that was made replaces it.
        """
        ...

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        """All weights have come. Where the engine has a checksum, another `checksum` is CHECKSUM_MISMATCH."""
        ...

    async def abort_weight_update(self, timeout: float) -> bool:
        """No more weights will come; True unless it is certain that no byte arrived."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Stream one output; closing the iterator ends the request in the engine."""
        ...

    async def progress(self) -> EngineProgress:
        """Read how far the requests are."""
        ...

    async def close(self) -> None:
        """Let go of the engine, which goes on as it is (one that lives in this process ends)."""
        ...
