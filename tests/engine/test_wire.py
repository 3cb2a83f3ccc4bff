"""Requests as they travel from a caller to a controller, and on to an agent."""

from __future__ import annotations

import pytest

from services.engine.backends.base import EngineRequest
from services.engine.domain.requests import Sampling
from services.engine.wire.requests import read_generation, write_engine_request
from turnout.engine.v1 import engine_pb2 as pb


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (pb.Sampling(seed=0), Sampling(seed=0)),
        (pb.Sampling(seed=5, seed_is_default=True), Sampling(seed=5, seed_is_default=True)),
        (pb.Sampling(), None),
    ],
)
def test_an_agent_learns_whether_anybody_asked_for_the_seed(sampling: pb.Sampling, expected: Sampling | None) -> None:
    """Its engine would draw slowly for every request, or would not draw again what it drew before."""
    asked = read_generation(pb.GenerateRequest(request_id="a", prompt_token_ids=[1], max_tokens=9, sampling=sampling))
    if expected is None:
        assert asked.sampling.seed_is_default
    else:
        assert asked.sampling == expected
    forwarded = EngineRequest("other-id", asked.prompt, asked.output, asked.max_tokens, asked.sampling)
    assert read_generation(write_engine_request("run", "r", forwarded)).sampling == asked.sampling
