"""Requests of verl's servers that say whose they are, and how they ended.

verl gives every turn a fresh id that says nothing, and a server forgets a request as it ends. So the client, which runs
in the process and the task of the agent loop, gives ids that tell partition, group and session; under full determinism,
where the engine has to see the caller's id, it leaves the other one as a note in the server. When a request has ended
it leaves a note of what it made. Invariants: the notes are never waited for, and nothing fails with them; the
controller reads them in the server (`services.engine.cluster.verl_requests`), so names and forms are the same there.
"""

from __future__ import annotations

import contextvars
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.llm_server import LLMServerClient as VerlClient

PREFIX: Final = "turnout:"


@dataclass(slots=True)
class RequestKey:
    """The session of a group, and the length of its first prompt: after an abort or a tool call its prompt brings what
    was made before."""

    partition: str
    uid: str
    session: int
    first_prompt: int | None = None

    def made_before(self, prompt_tokens: int) -> int:
        """Tokens that a request with this prompt has behind the first one."""
        if self.first_prompt is None:
            self.first_prompt = prompt_tokens
        return max(0, prompt_tokens - self.first_prompt)


@dataclass(slots=True)
class Attempt:
    """One request. `server` and `name` are known once a server was acquired."""

    key: RequestKey
    prompt_tokens: int
    server: Any = None
    name: str = ""


REQUEST: contextvars.ContextVar[RequestKey | None] = contextvars.ContextVar("turnout_request", default=None)
"""The session that the present task runs."""

_attempt: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("turnout_attempt", default=None)


def fresh_id(key: RequestKey, before: int) -> str:
    """A fresh id: prefix, then partition, uid, session, tokens made before and 32 random digits as JSON."""
    parts = [key.partition, key.uid, key.session, before, uuid.uuid4().hex]
    return PREFIX + json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def note_name() -> Callable[[Any, str, str], None]:
    """A function that notes in a server how a request is called here. It is nested, so that it travels by value."""

    def note(server: Any, request_id: str, name: str) -> None:
        if not hasattr(server, "_turnout_names"):
            server._turnout_names = {}
        server._turnout_names[request_id] = name

    return note


def note_end() -> Callable[[Any, str, str, int, int], None]:
    """A function that notes in a server how a request ended: prompt and output tokens. The last 4096 are kept."""

    def note(server: Any, request_id: str, name: str, prompt: int, made: int) -> None:
        import collections

        getattr(server, "_turnout_names", {}).pop(request_id, None)
        if not hasattr(server, "_turnout_ended"):
            server._turnout_ended = collections.deque(maxlen=4096)
        ended = server._turnout_ended
        ended.append((ended[-1][0] + 1 if ended else 1, name, prompt, made))

    return note


class _Attempts(VerlClient):
    """Each request by itself: verl's client goes on with one that was aborted, by another."""

    async def generate(self, request_id: str, **given: Any) -> Any:
        key = REQUEST.get()
        if key is None:
            return await super().generate(request_id, **given)
        attempt = Attempt(key, len(given["prompt_ids"]))
        token = _attempt.set(attempt)
        try:
            output = await super().generate(request_id, **given)
        finally:
            _attempt.reset(token)
        # A request that the server's gate rejected was never in the engine.
        if output.token_ids:
            attempt.server.__ray_call__.remote(
                note_end(), request_id, attempt.name, attempt.prompt_tokens, len(output.token_ids)
            )
        return output


class LLMServerClient(FullyAsyncLLMServerClient, _Attempts):
    """verl's client of the servers, whose requests say whose they are."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
        server_id, server = await super()._acquire_server(request_id, **extra)
        attempt = _attempt.get()
        if attempt is not None:
            attempt.server = server
        return server_id, server

    def _vllm_request_id(self, request_id: str) -> str:
        given: str = super()._vllm_request_id(request_id)
        attempt = _attempt.get()
        if attempt is None:
            return given
        attempt.name = fresh_id(attempt.key, attempt.key.made_before(attempt.prompt_tokens))
        if given != request_id:
            return attempt.name
        attempt.server.__ray_call__.remote(note_name(), request_id, attempt.name)
        return given
