"""Request ids that tell whose request it is, so that progress read from verl's servers can be joined with groups.

verl gives every turn a fresh id that says nothing. Its client asks `_vllm_request_id` for it, in the process and the
task of the agent loop; there the id gets a prefix that the controller reads in the server.
"""

from __future__ import annotations

import contextvars
import json
import uuid
from dataclasses import dataclass
from typing import Final

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

PREFIX: Final = "turnout:"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The session of a group that a request belongs to."""

    partition: str
    uid: str
    session: int


REQUEST: contextvars.ContextVar[RequestKey | None] = contextvars.ContextVar("turnout_request", default=None)
"""The session that the present task runs."""


def fresh_id(key: RequestKey) -> str:
    """A fresh id: prefix, then partition, uid, session and 32 random digits as JSON."""
    parts = [key.partition, key.uid, key.session, uuid.uuid4().hex]
    return PREFIX + json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


class LLMServerClient(FullyAsyncLLMServerClient):
    """verl's client of the servers, whose requests say whose they are."""

    def _vllm_request_id(self, request_id: str) -> str:
        key = REQUEST.get()
        given: str = super()._vllm_request_id(request_id)
        # Under full determinism the engine has to see the caller's id.
        return given if key is None or given == request_id else fresh_id(key)
