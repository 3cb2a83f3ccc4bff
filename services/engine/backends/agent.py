"""An engine behind a node agent, which is this same service on the engine's node.

Invariants: all replicas of one agent share its channels; requests have a channel of their own, so that control calls
never wait behind them; a weight update at the agent is of kind ASLEEP, which leaves pausing, KV memory and resuming
to the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import google_crc32c
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.engine.backends.base import Answer, EngineOutput, EngineProgress, EngineRequest
from services.engine.domain.engine_state import EngineState
from services.engine.domain.operations import OutcomeKind
from services.engine.domain.spec import Cache, PauseMode, ReplicaSpec
from services.engine.wire.enums import CACHES, LEVELS, OUTCOME_KINDS, PAUSE_MODES
from services.engine.wire.operations import read_failure, read_shards, write_duration
from services.engine.wire.replicas import health_name, read_state
from services.engine.wire.requests import read_output, write_engine_request
from services.runtime.discovery import MetricsPlace
from services.runtime.errors import TurnoutError, invalid_argument, not_found
from services.runtime.peers import Dialer
from services.runtime.statuses import from_rpc_error
from turnout.engine.v1 import engine_pb2 as pb
from turnout.engine.v1 import engine_pb2_grpc

T = TypeVar("T")

READ_DEADLINE_S: Final = 30.0
"""gRPC deadline of reads. Commands have none: the controller watches their time, and an engine may carry out later what
was cut at its agent."""


class Agent:
    """The channels to one agent."""

    def __init__(self, target: str, dialer: Dialer) -> None:
        self.users = 0
        self._control, self._data = dialer.open(target), dialer.open(target)
        self.control = engine_pb2_grpc.EngineControllerStub(self._control.stubs)
        self.data = engine_pb2_grpc.EngineControllerStub(self._data.stubs)
        self.metrics = MetricsPlace(lambda: self._control.stubs, target)
        # Its type stubs know no asyncio.
        self.health: Any = health_pb2_grpc.HealthStub(self._control.stubs)
        self._reading: asyncio.Future[pb.ProgressReport] | None = None

    async def progress(self, run_id: str) -> pb.ProgressReport:
        """One reading of the agent, shared by all who ask while it is under way."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read(run_id))
            self._reading.add_done_callback(self._read_done)
        return await asyncio.shield(self._reading)

    async def _read(self, run_id: str) -> pb.ProgressReport:
        request = pb.GetProgressRequest(run_id=run_id)
        answer: pb.GetProgressResponse = await self.control.GetProgress(request, timeout=READ_DEADLINE_S)
        return answer.report

    def _read_done(self, reading: asyncio.Future[pb.ProgressReport]) -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()

    async def close(self) -> None:
        """Close the channels."""
        await self._control.channel.close()
        await self._data.channel.close()


class Agents:
    """The agents in use, by target."""

    def __init__(self, run_id: Callable[[], str], dialer: Dialer) -> None:
        self._run_id = run_id
        self._dialer = dialer
        self._agents: dict[str, Agent] = {}

    async def open(self, spec: ReplicaSpec) -> AgentBackend:
        """Connect to the agent of a replica."""
        if not spec.endpoint:
            raise invalid_argument("spec.endpoint", "the backend agent needs the gRPC target of the agent")
        agent = self._agents.get(spec.endpoint)
        if agent is None:
            agent = self._agents[spec.endpoint] = Agent(spec.endpoint, self._dialer)
        agent.users += 1
        return AgentBackend(spec.replica_id, agent, self._run_id, lambda: self._release(spec.endpoint))

    async def _release(self, target: str) -> None:
        agent = self._agents[target]
        agent.users -= 1
        if not agent.users:
            del self._agents[target]
            await agent.close()


class AgentBackend:
    """One replica of an agent."""

    def __init__(
        self, replica_id: str, agent: Agent, run_id: Callable[[], str], release: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._replica_id = replica_id
        self._agent = agent
        self._get_run_id = run_id
        self._release = release
        self._update_id = ""
        self._open_update = ""

    async def metrics_url(self) -> str | None:
        """Where its agent serves metrics for others, as http://HOST:PORT; None if it never said."""
        return await self._agent.metrics.url()

    @property
    def _run_id(self) -> str:
        return self._get_run_id()

    @property
    def _selector(self) -> pb.ReplicaSelector:
        return pb.ReplicaSelector(replica_ids=[self._replica_id])

    # ---------------------------------------------------------------------------------------------------------- reads

    async def probe(self) -> EngineState:
        request = pb.ListReplicasRequest(run_id=self._run_id, selector=self._selector)
        answer: pb.ListReplicasResponse = await self._ask(
            self._agent.control.ListReplicas(request, timeout=READ_DEADLINE_S)
        )
        state = self._read(answer.replicas, answer.incarnation)
        if state is None:
            raise not_found("REPLICA_NOT_FOUND", f"the agent has no replica {self._replica_id!r}")
        return state

    async def watch(self) -> None:
        # A call that is held: it ends with the agent's process, and tells of the engine what the agent sees.
        request = health_pb2.HealthCheckRequest(service=health_name(self._replica_id))
        call = self._agent.health.Watch(request)
        try:
            async for told in call:
                if told.status != health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError:
            return
        finally:
            call.cancel()

    async def progress(self) -> EngineProgress:
        report = await self._ask(self._agent.progress(self._run_id))
        counters = next((one for one in report.replicas if one.replica_id == self._replica_id), pb.ReplicaCounters())
        tokens = {
            request.engine_request_id: request.output_tokens
            for request in report.requests
            if request.replica_id == self._replica_id
        }
        return EngineProgress(
            tokens,
            counters.decoded_tokens,
            counters.prefilled_tokens,
            counters.prefill_seconds,
            counters.running,
            counters.waiting,
        )

    # -------------------------------------------------------------------------------------------------------- commands

    async def sleep(self, level: int, timeout: float) -> Answer:
        if self._open_update:
            # Whoever sleeps has left it; an agent refuses to put an engine to sleep in the middle of one.
            await self._abort_update(self._open_update)
        request = pb.SleepRequest(
            run_id=self._run_id,
            selector=self._selector,
            level=LEVELS.write(level),
            timeout=write_duration(timeout),
        )
        return await self._operate(self._agent.control.Sleep(request))

    async def wake_up(self, tags: Sequence[str], timeout: float) -> Answer:
        request = pb.WakeUpRequest(
            run_id=self._run_id,
            selector=self._selector,
            tags=pb.TagList(tags=tags),
            timeout=write_duration(timeout),
        )
        return await self._operate(self._agent.control.WakeUp(request))

    async def release_kv_cache(self, timeout: float) -> Answer:
        request = pb.ReleaseKvCacheRequest(
            run_id=self._run_id, selector=self._selector, timeout=write_duration(timeout)
        )
        return await self._operate(self._agent.control.ReleaseKvCache(request))

    async def resume_kv_cache(self, timeout: float) -> Answer:
        request = pb.ResumeKvCacheRequest(run_id=self._run_id, selector=self._selector, timeout=write_duration(timeout))
        return await self._operate(self._agent.control.ResumeKvCache(request))

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> Answer:
        request = pb.PauseRequest(
            run_id=self._run_id,
            selector=self._selector,
            mode=PAUSE_MODES.write(mode),
            clear_cache=clear_cache,
            timeout=write_duration(timeout),
        )
        return await self._operate(self._agent.control.Pause(request))

    async def resume(self, timeout: float) -> Answer:
        request = pb.ResumeRequest(run_id=self._run_id, selector=self._selector, timeout=write_duration(timeout))
        return await self._operate(self._agent.control.Resume(request))

    async def reset_caches(
        self, caches: frozenset[Cache], reset_running_requests: bool, reset_connectors: bool, timeout: float
    ) -> Answer:
        request = pb.ResetCachesRequest(
            run_id=self._run_id,
            selector=self._selector,
            caches=[CACHES.write(cache) for cache in caches],
            reset_running_requests=reset_running_requests,
            reset_connectors=reset_connectors,
            timeout=write_duration(timeout),
        )
        return await self._operate(self._agent.control.ResetCaches(request))

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        request = pb.AbortRequest(
            run_id=self._run_id,
            selector=self._selector,
            request_ids=request_ids or (),
            all_requests=request_ids is None,
        )
        await self._ask(self._agent.control.Abort(request, timeout=READ_DEADLINE_S))

    async def collective_rpc(self, method: str, arguments_json: str, shard: int | None, timeout: float) -> Answer:
        request = pb.CollectiveRpcRequest(
            run_id=self._run_id,
            selector=self._selector,
            method=method,
            arguments_json=arguments_json,
            shard=shard,
            timeout=write_duration(timeout),
        )
        return await self._operate(self._agent.control.CollectiveRpc(request))

    # --------------------------------------------------------------------------------------------------------- weights

    async def start_weight_update(self, update_id: str, version: int, adapter: bool, timeout: float) -> None:
        request = pb.BeginWeightUpdateRequest(
            run_id=self._run_id,
            # A repeat gets the agent's first answer: the same update there.
            request_id=f"{update_id} {self._replica_id}",
            selector=self._selector,
            kind=pb.UPDATE_KIND_ASLEEP,
            weight_version=version,
            adapter=adapter,
            # The controller has compared the versions.
            allow_older=True,
            timeout=write_duration(timeout),
        )
        try:
            answer: pb.BeginWeightUpdateResponse = await self._call(self._agent.control.BeginWeightUpdate(request))
        except TurnoutError as error:
            if error.reason != "UPDATE_OPEN" or not self._open_update:
                raise
            # One of an earlier controller, which nobody goes on with.
            await self._abort_update(self._open_update)
            answer = await self._call(self._agent.control.BeginWeightUpdate(request))
        self._update_id = self._open_update = answer.update_id

    async def update_weights(
        self, size: int, info_json: str, chunks: AsyncIterator[bytes], timeout: float, move_index: int = 0
    ) -> None:
        async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
            header = pb.UpdateWeightsHeader(
                run_id=self._run_id,
                update_id=self._update_id,
                size=size,
                info_json=info_json,
                move_index=move_index,
            )
            yield pb.UpdateWeightsRequest(header=header)
            crc = 0
            async for chunk in chunks:
                crc = google_crc32c.extend(crc, chunk)
                yield pb.UpdateWeightsRequest(chunk=chunk)
            yield pb.UpdateWeightsRequest(end=pb.UpdateWeightsEnd(crc32c=crc))

        await self._operate(self._agent.data.UpdateWeights(frames()))

    async def finish_weight_update(self, checksum: str, timeout: float) -> None:
        ack = pb.UpdateAck(replica_id=self._replica_id, ok=True, checksum=checksum)
        request = pb.CommitWeightUpdateRequest(
            run_id=self._run_id, update_id=self._update_id, acks=[ack], timeout=write_duration(timeout)
        )
        await self._operate(self._agent.control.CommitWeightUpdate(request))

    async def abort_weight_update(self, timeout: float) -> bool:
        # An agent that has none open never got a byte for one: the update did not begin there.
        update_id = self._update_id or self._open_update
        return bool(update_id) and await self._abort_update(update_id)

    async def _abort_update(self, update_id: str) -> bool:
        request = pb.AbortWeightUpdateRequest(run_id=self._run_id, update_id=update_id)
        answer: pb.AbortWeightUpdateResponse = await self._call(self._agent.control.AbortWeightUpdate(request))
        self._update_id = self._open_update = ""
        return self._replica_id in answer.half_updated

    # ------------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        call = self._agent.data.Generate(write_engine_request(self._run_id, self._replica_id, request))
        try:
            async for response in call:
                output = read_output(response)
                if output is not None:
                    yield output
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._release()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _read(self, replicas: Sequence[pb.Replica], incarnation: str) -> EngineState | None:
        for replica in replicas:
            if replica.spec.replica_id == self._replica_id:
                self._open_update = replica.update_id
                return read_state(replica, incarnation)
        return None

    async def _operate(self, call: Any) -> Answer:
        answer = await self._call(call)
        for outcome in answer.operation.outcomes:
            if OUTCOME_KINDS.read("kind", outcome.kind) is OutcomeKind.FAILED:
                raise read_failure(outcome)
        shards = read_shards(shard for outcome in answer.operation.outcomes for shard in outcome.shards)
        try:
            state = self._read(answer.operation.replicas, answer.operation.incarnation)
        except TurnoutError:
            # What was asked is done all the same; how the engine is now, a probe tells.
            state = None
        return Answer(shards, state)

    async def _call(self, call: Any) -> Any:
        try:
            return await self._ask(call)
        except TurnoutError as error:
            if error.reason != "PARTIAL":
                raise
            raise await self._failure(error) from None

    async def _failure(self, error: TurnoutError) -> TurnoutError:
        """What a failed operation of one replica failed with."""
        request = pb.GetOperationRequest(run_id=self._run_id, operation_id=error.metadata["operation_id"])
        answer: pb.GetOperationResponse = await self._ask(
            self._agent.control.GetOperation(request, timeout=READ_DEADLINE_S)
        )
        failed: Iterable[pb.ReplicaOutcome] = (one for one in answer.operation.outcomes if one.code)
        return next((read_failure(outcome) for outcome in failed), error)

    @staticmethod
    async def _ask(call: Any) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
