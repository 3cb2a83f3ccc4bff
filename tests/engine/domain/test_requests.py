"""The small nouns: specs, requests for output, tokens, blackout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.engine.domain.blackout import BlackoutMeter
from services.engine.domain.requests import Generation, Sampling, Segment, default_seed
from services.engine.domain.spec import Flags, Gpu, ReplicaSpec, Role
from services.engine.domain.tokens import Stretches
from services.runtime.errors import Code, TurnoutError


def field(act: Callable[[], object]) -> str:
    """The field that a refusal names."""
    with pytest.raises(TurnoutError) as caught:
        act()
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value.metadata["field"]


# ------------------------------------------------------------------------------------------------------------ specs

SPEC = ReplicaSpec("r", Role.HYBRID, "reference", gpus=(Gpu("n", "g"),))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"replica_id": ""}, "spec.replica_id"),
        ({"gpus": (Gpu("", "g"),)}, "spec.gpus.node"),
        ({"gpus": (Gpu("n", "\n"),)}, "spec.gpus.uuid"),
        ({"gpus": (Gpu("n", "g"), Gpu("n", "g"))}, "spec.gpus"),
        ({"shards": 0}, "spec.shards"),
        ({"flags": Flags(node_rank=-1)}, "spec.flags.node_rank"),
        ({"weight_version": -1}, "spec.weight_version"),
        ({"weight_version": 1, "weights_loaded": False}, "spec.weight_version"),
    ],
)
def test_a_wrong_spec_is_named(fields: dict[str, Any], name: str) -> None:
    """A replica that registers with nonsense is found out at once and not at the first lend."""
    SPEC.validate()
    assert field(replace(SPEC, **fields).validate) == name


def test_a_hybrid_replica_names_its_gpus() -> None:
    """Without them nobody could tell whose they are."""
    SPEC.require_gpus()
    replace(SPEC, role=Role.STANDALONE, gpus=()).require_gpus()
    assert field(replace(SPEC, gpus=()).require_gpus) == "spec.gpus"


# --------------------------------------------------------------------------------------------------------- requests


def made(**fields: Any) -> Generation:
    """A valid request, but for these fields."""
    given: dict[str, Any] = {"request_id": "r", "prompt": [1], "max_tokens": 5, "sampling": Sampling(), **fields}
    return Generation(**given)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"request_id": ""}, "request_id"),
        ({"session_id": "\x00"}, "session_id"),
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [-1]}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"output": Stretches([[1, -2]])}, "output_token_ids"),
        ({"output": Stretches([[1, 2]])}, "output_segments"),
        ({"segments": [Segment(-1, None, "r")]}, "output_segments.tokens"),
        ({"delta_tokens": -1}, "delta_tokens"),
        ({"delta_interval": math.inf}, "delta_interval"),
        ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature"),
        ({"sampling": Sampling(temperature=-0.1)}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": Sampling(top_p=math.nan)}, "sampling.top_p"),
        ({"sampling": Sampling(top_k=-1)}, "sampling.top_k"),
    ],
)
def test_a_wrong_request_is_named(fields: dict[str, Any], name: str) -> None:
    """A token id outside the vocabulary kills a real engine; NaN passes every comparison."""
    made().validate()
    assert field(made(**fields).validate) == name


def test_segments_follow_replicas_and_versions() -> None:
    """Every token has a replica and a version, and interrupted segments say so."""
    request = made(segments=[Segment(1, 6, "old")], output=Stretches([[9]]), session_id="s")
    request.validate()
    request.append("a", 7, [1, 2], [-0.5, -0.5])
    request.append("a", 7, [3], [])
    request.append("a", 8, [], [])
    request.append("a", 8, [4], [])
    assert request.segments == [Segment(1, 6, "old", True), Segment(3, 7, "a", True), Segment(1, 8, "a")]
    request.leave()
    assert request.segments[-1].continued is False
    request.append("a", 8, [5], [])
    assert request.segments[2:] == [Segment(1, 8, "a", True), Segment(1, 8, "a")]
    assert len(request.output) == 6


def test_a_piece_never_mixes_segments() -> None:
    """A client that adds deltas up has to know where the policy changed."""
    request = made()
    request.append("a", 7, [1], [])
    request.append("a", 7, [2], [])
    request.append("a", 8, [3], [])
    pieces = request.take()
    assert [(p.weight_version, p.token_ids, p.new_segment) for p in pieces] == [(7, [[1], [2]], True), (8, [[3]], True)]
    assert request.take() == []
    request.append("a", 8, [4], [])
    request.leave()
    request.append("b", 8, [5], [])
    assert [(p.replica_id, p.new_segment) for p in request.take()] == [("a", False), ("b", True)]


def test_the_default_seed_is_the_requests_own() -> None:
    """A continued output must not be drawn anew."""
    assert default_seed("a") == default_seed("a") != default_seed("b")


def test_stretches_keep_what_came() -> None:
    """A snapshot that grew under an engine would repeat tokens."""
    tokens = Stretches([[1, 2], []])
    snapshot = tokens.snapshot()
    tokens.append([3])
    tokens.append([])
    assert (len(tokens), len(snapshot), tokens.count) == (3, 2, 2)
    assert (tokens.since(), tokens.since(1), snapshot.since()) == ([[1, 2], [3]], [[3]], [[1, 2]])


# --------------------------------------------------------------------------------------------------------- blackout


def test_only_dark_time_counts() -> None:
    """A blackout that is summed up wrongly hides the cost of an update."""
    meter = BlackoutMeter(10.0)
    assert meter.total(12.0) == 2.0
    meter.change(12.0, serving=True)
    assert meter.total(20.0) == 2.0
    meter.change(20.0, serving=False)
    meter.change(21.0, serving=False)
    assert meter.total(25.0) == 7.0
