"""Token ids, and their log-probabilities, as payload bytes: pure.

Invariants: little-endian int32 ids, followed by as many float32 log-probabilities if the content type says so; what was
packed comes back exactly.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

from turnout.client._payloads import Bytes

TOKENS: Final = "application/x-turnout-int32"
"""Content type of token ids."""

TOKENS_AND_LOGPROBS: Final = "application/x-turnout-int32-float32"
"""Content type of token ids followed by their log-probabilities."""


def pack(token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> tuple[bytes, str]:
    """Return payload bytes and their content type. Raises ValueError if the lengths differ."""
    data = _bytes(array("i", token_ids))
    if not logprobs:
        return data, TOKENS
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    return data + _bytes(array("f", logprobs)), TOKENS_AND_LOGPROBS


def unpack(data: Bytes, content_type: str) -> tuple[list[int], list[float]]:
    """Return token ids and log-probabilities (none if there are none). Raises ValueError for anything else."""
    parts = {TOKENS: 1, TOKENS_AND_LOGPROBS: 2}.get(content_type)
    if parts is None:
        raise ValueError(f"{content_type!r} is not a content type of token ids")
    if len(data) % (4 * parts):
        raise ValueError(f"{len(data)} bytes do not divide into {content_type}")
    size = len(data) // parts
    token_ids, logprobs = array("i"), array("f")
    token_ids.frombytes(data[:size])
    logprobs.frombytes(data[size:])
    if sys.byteorder == "big":
        token_ids.byteswap()
        logprobs.byteswap()
    return token_ids.tolist(), logprobs.tolist()


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
