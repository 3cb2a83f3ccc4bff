"""Producing a trajectory with the engine controller's Generate.

Invariants: output of an earlier attempt is continued, not thrown away; the segments add up to the whole output; an
output that was aborted is handed back as partial, never finished.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncEngineClient, Generation
from turnout.engine.v1 import engine_pb2
from turnout.worker._job import Job
from turnout.worker._payloads import Payloads
from turnout.worker._tokens import TOKENS, TOKENS_AND_LOGPROBS, pack, unpack

DELTA_TOKENS: Final = 256
DELTA_INTERVAL_S: Final = 5
"""How much of an output, and of domain time, the loss of the controller costs at most: both limits must be reached. A
few messages per output are nothing beside its decoding."""

RequestFn = Callable[[Job, engine_pb2.GenerateRequest], None]
"""Changes the request of a job in place: max_tokens, sampling, session_id, ..."""
RewardFn = Callable[[Job, Generation], Mapping[str, float] | Awaitable[Mapping[str, float]]]
"""Returns the rewards of an output, by name."""
TokenizeFn = Callable[[Job], Sequence[int]]
"""Returns the token ids of a prompt that is not token ids already."""


class Interrupted(Exception):
    """The attempt was cut through no fault of its own; it is handed back with what there is."""

    def __init__(self, reason: str, partial: buffer_pb2.PartialOutput | None = None) -> None:
        super().__init__(reason)
        self.partial = partial


class EngineGenerator:
    """Produces trajectories with the engine controller."""

    def __init__(
        self,
        payloads: Payloads,
        engine: AsyncEngineClient,
        *,
        max_tokens: int,
        sampling: engine_pb2.Sampling,
        request_fn: RequestFn | None,
        reward_fn: RewardFn | None,
        tokenize: TokenizeFn | None,
    ) -> None:
        self._payloads = payloads
        self._engine = engine
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._request_fn = request_fn
        self._reward_fn = reward_fn
        self._tokenize = tokenize

    async def __call__(self, job: Job) -> buffer_pb2.Output:
        """Generate, reward and pack one output. Raises Interrupted if the engine aborted it."""
        request = self.request(job)
        before, logprobs = _partial_tokens(job)
        generation = await self._engine.generate(request)
        generation.token_ids = before + generation.token_ids
        generation.logprobs = logprobs + generation.logprobs
        output = buffer_pb2.Output(
            prompt_tokens=len(request.prompt_token_ids), segments=[_segment(one) for one in generation.segments]
        )
        data, content_type = pack(generation.token_ids, generation.logprobs)
        output.payload.CopyFrom(await self._payloads.make(data, content_type))
        if generation.finish_reason == engine_pb2.FINISH_REASON_ABORT:
            if not generation.token_ids:
                raise Interrupted("aborted before the first token")
            output.segments[-1].end = buffer_pb2.SEGMENT_END_CONTINUED
            raise Interrupted("aborted", buffer_pb2.PartialOutput(outputs=[output]))
        if self._reward_fn is not None:
            rewards: Any = self._reward_fn(job, generation)
            output.rewards.update(await rewards if inspect.isawaitable(rewards) else rewards)
        output.tags["finish_reason"] = engine_pb2.FinishReason.Name(generation.finish_reason).removeprefix(
            "FINISH_REASON_"
        )
        return output

    def request(self, job: Job) -> engine_pb2.GenerateRequest:
        """Return the request of a job, continuing what there is."""
        request = engine_pb2.GenerateRequest(
            run_id=job.run_id,
            join_key=engine_pb2.JoinKey(
                partition=job.partition, group_id=job.group_id, trajectory=job.index, attempt=job.attempt
            ),
            prompt_token_ids=self._prompt_tokens(job),
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            delta_tokens=DELTA_TOKENS,
            delta_interval=Duration(seconds=DELTA_INTERVAL_S),
        )
        request.output_token_ids.extend(_partial_tokens(job)[0])
        if job.partial is not None:
            request.output_segments.extend(_engine_segment(one) for one in job.partial.outputs[-1].segments)
        if self._request_fn is not None:
            self._request_fn(job, request)
        return request

    def _prompt_tokens(self, job: Job) -> Sequence[int]:
        if self._tokenize is not None:
            return self._tokenize(job)
        return unpack(job.prompt, job.content_type)[0]


def _partial_tokens(job: Job) -> tuple[list[int], list[float]]:
    if job.partial is None:
        return [], []
    payload = job.partial.outputs[-1].payload
    if payload.content_type not in (TOKENS, TOKENS_AND_LOGPROBS):
        raise ValueError(f"cannot continue an output whose payload is {payload.content_type!r}")
    return unpack(payload.inline, payload.content_type)


def _segment(segment: engine_pb2.OutputSegment) -> buffer_pb2.Segment:
    return buffer_pb2.Segment(
        tokens=segment.tokens,
        weight_version=segment.weight_version if segment.HasField("weight_version") else None,
        end=buffer_pb2.SEGMENT_END_CONTINUED if segment.continued else buffer_pb2.SEGMENT_END_COMPLETED,
        replica_id=segment.replica_id,
    )


def _engine_segment(segment: buffer_pb2.Segment) -> engine_pb2.OutputSegment:
    return engine_pb2.OutputSegment(
        tokens=segment.tokens,
        weight_version=segment.weight_version if segment.HasField("weight_version") else None,
        replica_id=segment.replica_id,
        continued=True,
    )
