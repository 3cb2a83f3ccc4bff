"""Request ids that tell whose request it is, so that progress read from verl's servers can be joined with groups.

verl gives every turn a fresh id that says nothing. Its client asks `_vllm_request_id` for it, in the process and the
task of the agent loop, after it has acquired a server with the prompt at hand. Invariant: under full determinism the
engine sees the caller's id, as verl wants it, and such requests are not known.
"""

from __future__ import annotations

import contextvars
import json
import uuid
from dataclasses import dataclass
from typing import Any, Final

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

PREFIX: Final = "turnout:"


@dataclass(slots=True)
class RequestKey:
    """The session of a group, and how far it is: after an abort or a tool call its prompt brings what was made."""

    partition: str
    uid: str
    session: int
    first_prompt: int | None = None
    """Tokens of the session's first prompt."""
    before: int = 0
    """Tokens that the present request has behind that prompt."""

    def acquired(self, prompt_tokens: int) -> None:
        """A request with this prompt is about to be sent."""
        if self.first_prompt is None:
            self.first_prompt = prompt_tokens
        self.before = max(0, prompt_tokens - self.first_prompt)


REQUEST: contextvars.ContextVar[RequestKey | None] = contextvars.ContextVar("turnout_request", default=None)
"""The session that the present task runs."""


def fresh_id(key: RequestKey) -> str:
    """A fresh id: prefix, then partition, uid, session, tokens made before and 32 random digits as JSON."""
    parts = [key.partition, key.uid, key.session, key.before, uuid.uuid4().hex]
    return PREFIX + json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


class LLMServerClient(FullyAsyncLLMServerClient):
    """verl's client of the servers, whose requests say whose they are."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
        key = REQUEST.get()
        if key is not None:
            key.acquired(len(extra["prompt_ids"]))
        return await super()._acquire_server(request_id, **extra)

    def _vllm_request_id(self, request_id: str) -> str:
        key = REQUEST.get()
        given: str = super()._vllm_request_id(request_id)
        return given if key is None or given == request_id else fresh_id(key)
