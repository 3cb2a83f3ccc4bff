"""Clients of the engine controller.

Invariant: output that came before a cut stays; the rest is asked for under a new id, with what there is as the output
so far, so that no token is decoded twice and none counts twice.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import google_crc32c

from turnout.client._calls import BlockingCallChannel, new_request_id
from turnout.client._client import AsyncClient, Client
from turnout.client._errors import TurnoutError, is_retryable, stream_ended
from turnout.client._link import Link, iterate_blocking, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._payloads import Bytes, size_of, weight_frames
from turnout.client._retry import Outage
from turnout.engine.v1 import engine_pb2, engine_pb2_grpc

DeltaFn = Callable[[engine_pb2.Delta], Awaitable[None] | None]
"""Called with every delta of a generation."""


@dataclass(slots=True)
class Generation:
    """What one Generate call produced."""

    token_ids: list[int] = field(default_factory=list)
    """New tokens, without those of the request's output so far."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probabilities, if asked for."""
    segments: list[engine_pb2.OutputSegment] = field(default_factory=list)
    """All segments, those of the request included."""
    finish_reason: engine_pb2.FinishReason.ValueType = engine_pb2.FINISH_REASON_UNSPECIFIED
    """Why it ended."""

    def add(self, delta: engine_pb2.Delta) -> None:
        """Append new output."""
        if delta.token_ids:
            if delta.new_segment or not self.segments or self.segments[-1].continued:
                self._interrupted()
                self.segments.append(engine_pb2.OutputSegment(replica_id=delta.replica_id))
                if delta.HasField("weight_version"):
                    self.segments[-1].weight_version = delta.weight_version
            self.segments[-1].tokens += len(delta.token_ids)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def _interrupted(self) -> None:
        if self.segments:
            self.segments[-1].continued = True

    def continue_in(self, request: engine_pb2.GenerateRequest, first: engine_pb2.GenerateRequest) -> None:
        """Make `request` ask for what `first` asked for, less what there is of it."""
        self._interrupted()
        del request.output_token_ids[:]
        request.output_token_ids.extend(first.output_token_ids)
        request.output_token_ids.extend(self.token_ids)
        del request.output_segments[:]
        request.output_segments.extend(first.output_segments)
        request.output_segments.extend(self.segments)


class AsyncEngineClient(AsyncClient):
    """The engine controller, for asyncio. `calls` has every call of the contract."""

    def __init__(
        self,
        target: str,
        options: ClientOptions | None = None,
        *,
        rng: random.Random | None = None,
        link: Link | None = None,
    ) -> None:
        """See AsyncClient."""
        super().__init__(target, options, rng=rng, link=link)
        self.calls: engine_pb2_grpc.EngineControllerAsyncStub = engine_pb2_grpc.EngineControllerStub(
            cast(Any, self._channel)
        )
        """Every call, by its name in the contract: `await client.calls.Sleep(request, timeout=...)`."""

    async def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the controller."""
        return (await self.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run_id))).incarnation

    async def generate(self, request: engine_pb2.GenerateRequest, *, on_delta: DeltaFn | None = None) -> Generation:
        """Generate one output, and collect it.

        If the controller goes away, the rest is asked for again, under a new id and with the same seed; what the deltas
        brought stays. Without a request_id one is made.
        """
        link = self.link
        armed = engine_pb2.GenerateRequest()
        armed.CopyFrom(request)
        armed.request_id = request.request_id or new_request_id()
        if not armed.sampling.HasField("seed"):
            # The controller's own choice for this id, kept when the id changes.
            armed.sampling.seed_is_default = True
            armed.sampling.seed = google_crc32c.value(armed.request_id.encode())
        generation = Generation()
        outage = Outage(self.options.retry, self._policy.rng, now=link.now(), limit=self.options.timeouts.outage)
        while True:
            outage.began(link.now())
            events = self.calls.Generate(armed)
            try:
                async for event in events:
                    outage.heard(link.now())
                    if event.WhichOneof("event") == "done":
                        generation.add(event.done.rest)
                        generation.segments = list(event.done.segments)
                        generation.finish_reason = event.done.finish_reason
                        return generation
                    if event.HasField("delta"):
                        generation.add(event.delta)
                        if on_delta is not None:
                            await link.invoke(on_delta, event.delta)
                raise stream_ended("the generation ended without its final event")
            except TurnoutError as error:
                pause = outage.pause(link.now(), error.retry_after) if is_retryable(error) else None
                if pause is None:
                    raise
            finally:
                events.cancel()
            armed.request_id = new_request_id()
            generation.continue_in(armed, request)
            await link.sleep(pause)

    async def send_weights(
        self,
        run_id: str,
        update_id: str,
        data: Bytes | Sequence[Bytes],
        *,
        epoch: int | None = None,
        replica_ids: Sequence[str] = (),
        wave_index: int = 0,
        move_index: int = 0,
        info_json: str = "",
    ) -> engine_pb2.Operation:
        """Move weights through the controller, in chunks with a checksum. Replicas that failed are in the operation.

        All is sent again if the controller goes away meanwhile. Give the next move to the same replicas of a wave the
        next `move_index`: one of the last number replaces that move.
        """
        header = engine_pb2.UpdateWeightsHeader(
            run_id=run_id,
            epoch=epoch,
            update_id=update_id,
            replica_ids=replica_ids,
            wave_index=wave_index,
            move_index=move_index,
            size=size_of(data),
            info_json=info_json,
        )

        async def send(timeout: float) -> engine_pb2.Operation:
            return (await self.calls.UpdateWeights(weight_frames(header, data), timeout=timeout)).operation

        return await self._upload(send)

    async def watch_replicas(
        self, request: engine_pb2.WatchReplicasRequest
    ) -> AsyncGenerator[engine_pb2.WatchReplicasResponse, None]:
        """Yield replicas: all at once, then those that changed. After a cut it begins again with all of them."""
        async with aclosing(self._follow(self.calls.WatchReplicas, lambda: request)) as messages:
            async for message in messages:
                yield message

    async def watch_routes(
        self, request: engine_pb2.WatchRoutesRequest
    ) -> AsyncGenerator[engine_pb2.WatchRoutesResponse, None]:
        """Yield the membership: at once, then after each change."""
        async with aclosing(self._follow(self.calls.WatchRoutes, lambda: request)) as messages:
            async for message in messages:
                yield message

    async def watch_progress(
        self, request: engine_pb2.WatchProgressRequest
    ) -> AsyncGenerator[engine_pb2.ProgressReport, None]:
        """Yield one report per interval."""
        async with aclosing(self._follow(self.calls.WatchProgress, lambda: request)) as messages:
            async for message in messages:
                yield message.report


class EngineClient(Client):
    """The engine controller, blocking. The methods are those of AsyncEngineClient."""

    def __init__(self, target: str, options: ClientOptions | None = None, *, rng: random.Random | None = None) -> None:
        """See Client."""
        super().__init__(target, options, rng=rng)
        self.core = AsyncEngineClient(target, self.options, rng=rng, link=self.link)
        self.calls: engine_pb2_grpc.EngineControllerStub = engine_pb2_grpc.EngineControllerStub(
            cast(Any, BlockingCallChannel(self._policy))
        )
        """Every call, by its name in the contract: `client.calls.Sleep(request, timeout=...)`."""

    def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the controller."""
        return run_blocking(self.core.incarnation(run_id))

    def generate(self, request: engine_pb2.GenerateRequest, *, on_delta: DeltaFn | None = None) -> Generation:
        """See AsyncEngineClient."""
        return run_blocking(self.core.generate(request, on_delta=on_delta))

    def send_weights(
        self,
        run_id: str,
        update_id: str,
        data: Bytes | Sequence[Bytes],
        *,
        epoch: int | None = None,
        replica_ids: Sequence[str] = (),
        wave_index: int = 0,
        move_index: int = 0,
        info_json: str = "",
    ) -> engine_pb2.Operation:
        """See AsyncEngineClient."""
        return run_blocking(
            self.core.send_weights(
                run_id,
                update_id,
                data,
                epoch=epoch,
                replica_ids=replica_ids,
                wave_index=wave_index,
                move_index=move_index,
                info_json=info_json,
            )
        )

    def watch_replicas(
        self, request: engine_pb2.WatchReplicasRequest
    ) -> Generator[engine_pb2.WatchReplicasResponse, None, None]:
        """See AsyncEngineClient."""
        return iterate_blocking(self.core.watch_replicas(request))

    def watch_routes(
        self, request: engine_pb2.WatchRoutesRequest
    ) -> Generator[engine_pb2.WatchRoutesResponse, None, None]:
        """See AsyncEngineClient."""
        return iterate_blocking(self.core.watch_routes(request))

    def watch_progress(
        self, request: engine_pb2.WatchProgressRequest
    ) -> Generator[engine_pb2.ProgressReport, None, None]:
        """See AsyncEngineClient."""
        return iterate_blocking(self.core.watch_progress(request))
