"""The methods of the engine client."""

from __future__ import annotations

import google_crc32c
import grpc
import pytest

from tests.client.fakes import events, failing, fake, in_turn
from turnout.client import AsyncEngineClient, ClientOptions, EngineClient, NotFound, RetryPolicy, Timeouts, Unavailable
from turnout.engine.v1 import engine_pb2

QUICK = ClientOptions(timeouts=Timeouts(outage=0.3), retry=RetryPolicy(initial=0.01, maximum=0.02))
DRAINING = failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")
REQUEST = engine_pb2.GenerateRequest(run_id="r1", prompt_token_ids=[1], max_tokens=9)


def delta(*token_ids: int) -> engine_pb2.GenerateResponse:
    logprobs = [-0.5] * len(token_ids)
    return engine_pb2.GenerateResponse(delta=engine_pb2.Delta(token_ids=token_ids, logprobs=logprobs))


def done(*token_ids: int) -> engine_pb2.GenerateResponse:
    return engine_pb2.GenerateResponse(
        done=engine_pb2.GenerateDone(
            finish_reason=engine_pb2.FINISH_REASON_LENGTH,
            rest=engine_pb2.Delta(token_ids=token_ids, logprobs=[-1.0] * len(token_ids)),
            segments=[engine_pb2.OutputSegment(tokens=3, weight_version=2, replica_id="s0")],
        )
    )


def test_a_generation_is_put_together_from_its_deltas() -> None:
    """Tokens of deltas and of the final message are one output; either part alone is truncated."""
    seen: list[list[int]] = []
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["Generate"] = events(delta(5), delta(6), done(7))
        made = client.generate(REQUEST, on_delta=lambda part: seen.append(list(part.token_ids)))
    assert made.token_ids == [5, 6, 7]
    assert made.logprobs == [-0.5, -0.5, -1.0]
    assert made.finish_reason == engine_pb2.FINISH_REASON_LENGTH
    assert [segment.replica_id for segment in made.segments] == ["s0"]
    assert seen == [[5], [6]]
    assert REQUEST.request_id == ""


async def test_output_that_came_before_a_cut_stays_and_the_rest_is_asked_for() -> None:
    """Decoding thousands of tokens twice costs minutes of a GPU; counting them twice trains on nonsense."""

    def part(*token_ids: int, version: int, new: bool = False) -> engine_pb2.GenerateResponse:
        answer = delta(*token_ids)
        answer.delta.weight_version, answer.delta.replica_id, answer.delta.new_segment = version, f"s{version}", new
        return answer

    before = engine_pb2.OutputSegment(tokens=2, weight_version=1, replica_id="old", continued=True)
    first = engine_pb2.GenerateRequest(output_token_ids=[3, 4], output_segments=[before])
    first.MergeFrom(REQUEST)
    with fake("engine") as service:
        service.script["Generate"] = in_turn(
            events(part(5, version=1, new=True), part(6, version=1), part(7, version=2, new=True)),
            DRAINING,
            events(part(8, version=2, new=True)),
            events(done(9)),
        )
        async with AsyncEngineClient(service.target, QUICK) as client:
            made = await client.generate(first)
        asked = service.requests("Generate")
    assert made.token_ids == [5, 6, 7, 8, 9]
    assert made.logprobs == [-0.5] * 4 + [-1.0]
    assert [list(request.output_token_ids) for request in asked] == [[3, 4], *[[3, 4, 5, 6, 7]] * 2, [3, 4, 5, 6, 7, 8]]
    assert [(s.tokens, s.weight_version, s.replica_id, s.continued) for s in asked[-1].output_segments] == [
        (2, 1, "old", True),
        (2, 1, "s1", True),
        (1, 2, "s2", True),
        (1, 2, "s2", True),
    ]
    assert len({request.request_id for request in asked}) == 4
    # Sampling goes on as it began, though the controller derives the seed from the id.
    assert all(request.sampling.seed_is_default for request in asked)
    assert {request.sampling.seed for request in asked} == {google_crc32c.value(asked[0].request_id.encode())}
    assert {request.max_tokens for request in asked} == {9}


@pytest.mark.parametrize(
    ("code", "reason", "raised"),
    [
        (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND", NotFound),
        (grpc.StatusCode.UNAVAILABLE, "NO_REPLICA", Unavailable),
    ],
)
def test_a_generation_that_cannot_be_had_ends_in_an_error(
    code: grpc.StatusCode, reason: str, raised: type[Exception]
) -> None:
    """No replica for as long as an outage may last is an error, not a hang; a wrong run is one at once."""
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["Generate"] = failing(code, reason)
        with pytest.raises(raised, match=reason):
            client.generate(REQUEST)


def test_a_generation_that_ends_without_its_final_event_again_and_again_is_an_error() -> None:
    """Asked again without a pause and without an end, it would load controller and worker for ever."""
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["Generate"] = events()
        with pytest.raises(Unavailable, match="STREAM_ENDED"):
            client.generate(REQUEST)
        assert len(service.requests("Generate")) > 2


def test_watches_of_the_controller_begin_again_after_a_cut() -> None:
    """A view of the replicas that stands still after a restart shows GPUs where they no longer are."""
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["WatchReplicas"] = in_turn(DRAINING, events(engine_pb2.WatchReplicasResponse(incarnation="a")))
        service.script["WatchRoutes"] = in_turn(DRAINING, events(engine_pb2.WatchRoutesResponse(version=4)))
        report = engine_pb2.ProgressReport(at=2.5)
        service.script["WatchProgress"] = in_turn(DRAINING, events(engine_pb2.WatchProgressResponse(report=report)))
        replicas = client.watch_replicas(engine_pb2.WatchReplicasRequest(run_id="r1"))
        assert [message.incarnation for message in replicas] == ["a"]
        routes = client.watch_routes(engine_pb2.WatchRoutesRequest(run_id="r1"))
        assert [message.version for message in routes] == [4]
        progress = client.watch_progress(engine_pb2.WatchProgressRequest(run_id="r1"))
        assert [one.at for one in progress] == [2.5]
        assert len(service.requests("WatchRoutes")) == 2


def test_the_incarnation_of_the_controller_is_visible() -> None:
    """What was confirmed under another incarnation is not known any more."""
    with fake("engine") as service, EngineClient(service.target, QUICK) as client:
        service.script["ListReplicas"] = lambda request, context: engine_pb2.ListReplicasResponse(incarnation="i-7")
        assert client.incarnation("r1") == "i-7"
