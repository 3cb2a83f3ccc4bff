"""Requests for output on the wire."""

from __future__ import annotations

from services.engine.backends.base import EngineOutput, EngineRequest
from services.engine.domain.requests import Finish, Generation, JoinKey, Piece, Sampling, Segment, default_seed
from services.engine.domain.tokens import Stretches
from services.engine.generation import DoneEvent, Event, PlacedEvent
from services.engine.wire.enums import FINISHES
from services.runtime.waits import duration_seconds
from turnout.engine.v1 import engine_pb2 as pb

DELTA_TOKENS = 64
DELTA_INTERVAL_S = 0.5


def read_generation(request: pb.GenerateRequest) -> Generation:
    """A request as the domain knows it."""
    delta_tokens = request.delta_tokens if request.HasField("delta_tokens") else DELTA_TOKENS
    interval = 0.0 if delta_tokens == 0 else DELTA_INTERVAL_S
    if request.HasField("delta_interval"):
        interval = duration_seconds(request.delta_interval, "delta_interval")
    return Generation(
        request_id=request.request_id,
        prompt=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=_read_sampling(request),
        output=Stretches([request.output_token_ids]),
        segments=[
            Segment(
                segment.tokens,
                segment.weight_version if segment.HasField("weight_version") else None,
                segment.replica_id,
                segment.continued,
            )
            for segment in request.output_segments
        ],
        join_key=read_join_key(request.join_key) if request.HasField("join_key") else None,
        session_id=request.session_id,
        delta_tokens=delta_tokens,
        delta_interval=interval,
        pinned_to=request.replica_id,
    )


def write_event(event: Event, generation: Generation) -> pb.GenerateResponse:
    """An event as it travels."""
    match event:
        case PlacedEvent(replica_id=replica_id, parked=parked):
            return pb.GenerateResponse(placed=pb.Placed(replica_id=replica_id, parked=parked))
        case Piece():
            response = pb.GenerateResponse()
            _write_piece(response.delta, event)
            return response
        case DoneEvent(finish=finish, rest=rest):
            # Filled in place: a message that is passed to another's constructor is copied, whole outputs with it.
            response = pb.GenerateResponse()
            done = response.done
            done.finish_reason = FINISHES.write(finish)
            done.segments.extend(_write_segment(segment) for segment in generation.segments)
            if rest is not None:
                _write_piece(done.rest, rest)
            return response


def write_engine_request(run_id: str, replica_id: str, request: EngineRequest) -> pb.GenerateRequest:
    """A request for one replica of an agent."""
    sampling = request.sampling
    message = pb.GenerateRequest(
        run_id=run_id,
        replica_id=replica_id,
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        max_tokens=request.max_tokens,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            seed_is_default=sampling.seed_is_default,
            stop_token_ids=sampling.stop_token_ids,
            logprobs=sampling.logprobs,
        ),
        delta_tokens=request.delta_tokens,
    )
    for stretch in request.output.since():
        message.output_token_ids.extend(stretch)
    if request.output:
        # The agent only has to see that the lengths add up; the controller keeps the true segments.
        message.output_segments.add(tokens=len(request.output))
    message.delta_interval.FromMicroseconds(round(request.delta_interval * 1e6))
    if request.join_key is not None:
        message.join_key.CopyFrom(write_join_key(request.join_key))
    return message


def read_output(response: pb.GenerateResponse) -> EngineOutput | None:
    """What an agent's event means to the controller; None for one that means nothing to it."""
    match response.WhichOneof("event"):
        case "delta":
            return _read_delta(response.delta, None)
        case "done":
            return _read_delta(response.done.rest, FINISHES.read("finish_reason", response.done.finish_reason))
        case _:
            return None


def _read_delta(delta: pb.Delta, finish: Finish | None) -> EngineOutput:
    version = delta.weight_version if delta.HasField("weight_version") else None
    return EngineOutput(delta.token_ids, delta.logprobs, version, finish)


def write_join_key(key: JoinKey) -> pb.JoinKey:
    """The trajectory as it travels."""
    return pb.JoinKey(partition=key.partition, group_id=key.group_id, trajectory=key.trajectory, attempt=key.attempt)


def read_join_key(key: pb.JoinKey) -> JoinKey:
    """The trajectory that a message names."""
    return JoinKey(key.partition, key.group_id, key.trajectory, key.attempt)


def _read_sampling(request: pb.GenerateRequest) -> Sampling:
    sampling = request.sampling
    return Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else default_seed(request.request_id),
        seed_is_default=sampling.seed_is_default or not sampling.HasField("seed"),
        stop_token_ids=tuple(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
    )


def _write_piece(delta: pb.Delta, piece: Piece) -> None:
    delta.weight_version = piece.weight_version
    delta.replica_id = piece.replica_id
    delta.new_segment = piece.new_segment
    # Extending by a repeated field, which is what agents send, copies without making Python objects.
    for ids in piece.token_ids:
        delta.token_ids.extend(ids)
    for values in piece.logprobs:
        delta.logprobs.extend(values)


def _write_segment(segment: Segment) -> pb.OutputSegment:
    return pb.OutputSegment(
        tokens=segment.tokens,
        weight_version=segment.weight_version,
        replica_id=segment.replica_id,
        continued=segment.continued,
    )
