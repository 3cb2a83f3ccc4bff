"""What is read in a server of verl's about requests of verl's own clients.

The notes are left there by the client of `turnout.integrations.verl`, which gives ids that tell whose a request is:
`_turnout_names` has such an id where the engine sees another, `_turnout_ended` has number, such an id, prompt and
output tokens of what has ended. Invariant: a request that does not say whose it is is counted and no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.engine.backends.base import ForeignRequest
from services.engine.domain.requests import JoinKey

PREFIX: Final = "turnout:"
"""Of the request ids that `turnout.integrations.verl` gives."""

FIRST_ATTEMPT: Final = 1
"""verl's agent loops issue a session once."""


@dataclass(frozen=True, slots=True)
class Requests:
    """How many are in an engine; of these and of those that have ended the ones that say whose they are; and the number
    of the last note of an end."""

    count: int
    present: tuple[ForeignRequest, ...]
    ended: tuple[ForeignRequest, ...]
    last_note: int


def look_at_requests() -> Callable[[Any, int], dict[str, Any]]:
    """A function that tells id, prompt and output tokens of the requests in a server's engine, -1 if not known, and of
    those that have ended since the note with that number. It is nested, so that it travels by value."""

    def requests(server: Any, after: int) -> dict[str, Any]:
        found = []
        names = getattr(server, "_turnout_names", {})
        states = getattr(getattr(getattr(server, "engine", None), "output_processor", None), "request_states", {})
        for request_id, state in list(states.items()):
            made = getattr(getattr(state, "detokenizer", None), "output_token_ids", None)
            if made is None:
                made = getattr(state, "output_token_ids", None)
            prompt = getattr(state, "prompt_len", None)
            # vLLM may put something of its own behind an id.
            name = names.get(request_id) or names.get(request_id.rpartition("-")[0]) or request_id
            found.append((name, -1 if prompt is None else prompt, -1 if made is None else len(made)))
        ended = list(getattr(server, "_turnout_ended", ()))
        return {
            "present": found,
            "ended": [note[1:] for note in ended if note[0] > after],
            "last": ended[-1][0] if ended else 0,
        }

    return requests


def read_requests(found: Mapping[str, Any]) -> Requests:
    """What that function told."""
    return Requests(len(found["present"]), _read_all(found["present"]), _read_all(found["ended"]), found["last"])


def foreign_request(request_id: str, prompt: int, made: int) -> ForeignRequest | None:
    """What the id says that the adapter's client gave: partition, group, session, and tokens made before it, as JSON.

    vLLM may put something of its own behind the id.
    """
    start, end = request_id.find(PREFIX), request_id.rfind("]") + 1
    if start < 0 or prompt < 0 or made < 0:
        return None
    try:
        partition, group, session, before, _ = json.loads(request_id[start + len(PREFIX) : end])
        key = JoinKey(str(partition), str(group), int(session), FIRST_ATTEMPT)
        name = request_id[start:end]
        return ForeignRequest(name, key, max(0, prompt - int(before)), int(before) + made, int(before))
    except (ValueError, TypeError):
        return None


def _read_all(found: Iterable[tuple[str, int, int]]) -> tuple[ForeignRequest, ...]:
    read = (foreign_request(*each) for each in found)
    return tuple(request for request in read if request is not None)
