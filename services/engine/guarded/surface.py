"""The calls of an inference engine as it has them, wherever it runs; the words are those of vLLM.

Invariants: nothing here makes a call safe: that is what `services.engine.guarded.backend` is for, and it alone calls
these. What an engine cannot do is absent from `offers`, found by asking it and never by its version. A call that the
engine refuses or fails in raises a TurnoutError: UNAVAILABLE / ENGINE_DEAD if the engine is gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.engine.domain.requests import Finish

SLEEP: Final = "sleep"
SLEEP_MODE: Final = "sleep_mode"
WAKE_TAGS: Final = "wake_tags"
RELEASE_KV: Final = "release_kv_cache"
PAUSE: Final = "pause"
PAUSE_MODE: Final = "pause_mode"
KEEP: Final = "keep"
"""A pause can keep requests."""
IS_PAUSED: Final = "is_paused"
RESET_CONNECTORS: Final = "reset_connectors"
RESET_RUNNING: Final = "reset_running"
RESET_MM: Final = "reset_mm_cache"
RESET_ENCODER: Final = "reset_encoder_cache"
COLLECTIVE_RPC: Final = "collective_rpc"
WEIGHT_TRANSFER: Final = "weight_transfer"
WEIGHT_FILES: Final = "weight_files"
"""A weight transfer takes files, as our transfer engine does."""
RELOAD: Final = "reload"
WEIGHT_SESSIONS: Final = "weight_sessions"
"""start_ and finish_weight_update around the update calls."""
WEIGHT_VERSION: Final = "weight_version"
MEMORY: Final = "memory"
"""Our worker extension is there and tells what memory the workers hold."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a request; the last ones have `finish`. `logprobs` is empty unless asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prefill_seconds: float = 0.0
    """Wall seconds between being scheduled and the first token, with the output that has it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of a request are drawn. `max_tokens` counts new tokens; `seed` None: the engine's own."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_token_ids: tuple[int, ...]
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What an engine tells about itself; None where it does not tell.

    `asleep` is vLLM's is_sleeping, which is true for a mere pause too; `asleep_tags` and `sleep_level` are what its
    last sleep was, without the tags that woke since. `memory_bytes` is what all workers hold, `tagged_bytes` what is
    behind the tensors of each tag.
    """

    asleep: bool | None = None
    paused: bool | None = None
    asleep_tags: frozenset[str] | None = None
    sleep_level: int | None = None
    unfinished: int = 0
    weight_version: str | None = None
    memory_bytes: int | None = None
    tagged_bytes: Mapping[str, int] | None = None


class Surface(Protocol):
    """One engine."""

    offers: frozenset[str]
    vocabulary: int | None
    """Number of token ids, None if it is not known."""
    longest: int | None
    """Most tokens of a prompt and its output together."""
    text_only: bool
    """Whether there is no encoder whose cache could be stale."""
    incarnation: str
    tags: frozenset[str]
    """The memory that the engine manages."""
    schedules_when_awake: bool
    """Whether the engine starts to schedule by itself once its last tag is awake."""

    async def check(self) -> None:
        """Raise UNAVAILABLE / ENGINE_DEAD if the engine is gone; asks nothing of an engine that is busy."""
        ...

    async def read(self, memory: bool = True) -> Reading:
        """Ask the engine, at any time; without `memory` nothing is measured."""
        ...

    async def unfinished(self) -> int:
        """Requests that are in the engine, waiting ones too."""
        ...

    async def sleep(self, level: int, mode: str) -> None: ...
    async def wake_up(self, tags: Sequence[str] | None) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def pause(self, mode: str, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]: ...
    async def reload_weights(self, path: str) -> None: ...
    async def init_transfer(self, info: Mapping[str, Any]) -> None: ...
    async def start_update(self) -> None: ...
    async def update_weights(self, info: Any) -> None: ...
    async def finish_update(self) -> None: ...
    async def set_version(self, version: str) -> None: ...

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests by the ids given to `generate`; None is all, those of others too."""
        ...

    def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        """Stream one output; closing the stream ends the request."""
        ...

    async def close(self) -> None:
        """Let go of the engine; one that lives in this process ends."""
        ...
