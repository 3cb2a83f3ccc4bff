"""What the engine tests share: a controller over a real socket, raw stubs, and readers of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import google_crc32c
import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from services.engine.controller import Controller
from services.engine.fleet import OpenBackend
from services.engine.service import EngineService, build
from services.engine.settings import EngineSettings
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import ServiceHost
from services.runtime.statuses import from_rpc_error
from turnout.engine.v1 import engine_pb2 as pb
from turnout.engine.v1 import engine_pb2_grpc

RUN = "run-1"
WEIGHTS = b"new weights " * 1000


@dataclass
class Engine:
    """A running controller."""

    host: ServiceHost
    stub: engine_pb2_grpc.EngineControllerAsyncStub

    @property
    def controller(self) -> Controller:
        """Its inside, for what the wire does not show."""
        service = self.host.service
        assert isinstance(service, EngineService)
        return service.controller


@asynccontextmanager
async def running(
    clock: Clock | None = None, *, open_backend: OpenBackend | None = None, **settings: Any
) -> AsyncIterator[Engine]:
    """A controller with these settings."""
    given: dict[str, Any] = {"listen": ["127.0.0.1:0"], "weights_bytes": 1 << 16, "kv_bytes": 1 << 16, **settings}
    async with (
        build(EngineSettings(**given), clock, open_backend) as host,
        grpc.aio.insecure_channel(host.target) as channel,
    ):
        yield Engine(host, engine_pb2_grpc.EngineControllerStub(channel))


def seconds(value: float) -> Duration:
    """A Duration."""
    duration = Duration()
    duration.FromMicroseconds(round(value * 1e6))
    return duration


def spec(replica_id: str, role: str = "hybrid", **fields: Any) -> pb.ReplicaSpec:
    """A replica on the reference engine, with a GPU of its own."""
    fields.setdefault("backend", "reference")
    fields.setdefault("gpus", [pb.Gpu(node="n0", uuid=f"gpu-{replica_id}")])
    return pb.ReplicaSpec(replica_id=replica_id, role=pb.ReplicaRole.Value(f"REPLICA_ROLE_{role.upper()}"), **fields)


async def register(engine: Engine, replica_id: str, role: str = "hybrid", **fields: Any) -> pb.Replica:
    """Register a replica."""
    request = pb.RegisterRequest(run_id=RUN, spec=spec(replica_id, role, **fields))
    return (await engine.stub.Register(request)).replica


async def replicas(engine: Engine) -> dict[str, pb.Replica]:
    """All replicas by id."""
    answer = await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN))
    return {replica.spec.replica_id: replica for replica in answer.replicas}


def only(*replica_ids: str) -> pb.ReplicaSelector:
    """A selector of these replicas."""
    return pb.ReplicaSelector(replica_ids=replica_ids)


def role(name: str) -> pb.ReplicaSelector:
    """A selector of a role."""
    return pb.ReplicaSelector(roles=[pb.ReplicaRole.Value(f"REPLICA_ROLE_{name.upper()}")])


async def error_of(call: Any) -> TurnoutError:
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was expected to fail")


async def refused(call: Any, code: str, reason: str) -> TurnoutError:
    """Check that a call fails in this way."""
    error = await error_of(call)
    assert (error.code.name, error.reason) == (code, reason), error
    return error


async def partial(engine: Engine, call: Any, code: str) -> dict[str, pb.ReplicaOutcome]:
    """Check that an operation fails with PARTIAL and this code; returns its outcomes by replica."""
    error = await refused(call, code, "PARTIAL")
    request = pb.GetOperationRequest(run_id=RUN, operation_id=error.metadata["operation_id"])
    operation = (await engine.stub.GetOperation(request)).operation
    assert operation.state == pb.OPERATION_STATE_PARTIAL
    return {outcome.replica_id: outcome for outcome in operation.outcomes}


def kinds(operation: pb.Operation) -> dict[str, str]:
    """Outcome kinds by replica, in short."""
    return {
        outcome.replica_id: pb.OutcomeKind.Name(outcome.kind).removeprefix("OUTCOME_KIND_")
        for outcome in operation.outcomes
    }


async def move_weights(
    engine: Engine,
    update_id: str,
    weights: bytes = WEIGHTS,
    chunk: int = 4096,
    replica_ids: Sequence[str] = (),
    wave_index: int = 0,
    epoch: int | None = None,
    move_index: int = 0,
) -> pb.UpdateWeightsResponse:
    """Send weights through the controller."""

    async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        header = pb.UpdateWeightsHeader(
            run_id=RUN,
            epoch=epoch,
            update_id=update_id,
            size=len(weights),
            replica_ids=replica_ids,
            wave_index=wave_index,
            move_index=move_index,
        )
        yield pb.UpdateWeightsRequest(header=header)
        for start in range(0, len(weights), chunk):
            yield pb.UpdateWeightsRequest(chunk=weights[start : start + chunk])
        yield pb.UpdateWeightsRequest(end=pb.UpdateWeightsEnd(crc32c=google_crc32c.value(weights)))

    return await engine.stub.UpdateWeights(frames())


async def update(
    engine: Engine, selector: pb.ReplicaSelector, version: int, kind: str = "AWAKE", **fields: Any
) -> pb.CommitWeightUpdateResponse:
    """A whole weight transaction in one wave; vacated GPUs are reported for kind ASLEEP."""
    epoch = fields.get("epoch")
    begun = await engine.stub.BeginWeightUpdate(
        pb.BeginWeightUpdateRequest(
            run_id=RUN,
            selector=selector,
            weight_version=version,
            kind=pb.UpdateKind.Value(f"UPDATE_KIND_{kind}"),
            **fields,
        )
    )
    await move_weights(engine, begun.update_id, epoch=epoch)
    acks = [pb.UpdateAck(replica_id=layout.replica_id, ok=True) for layout in begun.wave]
    committed = await engine.stub.CommitWeightUpdate(
        pb.CommitWeightUpdateRequest(run_id=RUN, epoch=epoch, update_id=begun.update_id, acks=acks)
    )
    if kind == "ASLEEP":
        await vacate(engine, begun, epoch)
    return committed


async def vacate(
    engine: Engine, begun: pb.BeginWeightUpdateResponse, epoch: int | None = None
) -> pb.ReportVacatedResponse:
    """Report all GPUs of a transaction vacated."""
    gpus = [rank.gpu for layout in begun.wave for rank in layout.ranks]
    return await engine.stub.ReportVacated(
        pb.ReportVacatedRequest(
            run_id=RUN,
            epoch=epoch,
            update_id=begun.update_id,
            vacated=[pb.Vacated(gpu=gpu, bytes_free=1) for gpu in gpus],
        )
    )


async def lend(engine: Engine, lend_id: str, version: int) -> pb.FinishLendResponse:
    """A whole lend of all hybrid replicas."""
    await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id=lend_id))
    await update(engine, role("hybrid"), version, "ASLEEP")
    return await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id=lend_id, weight_version=version))


async def reclaim(engine: Engine) -> pb.ReclaimResponse:
    """Take all hybrid replicas back."""
    return await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))


@dataclass
class Output:
    """What a Generate stream gave."""

    tokens: list[int]
    finish: str
    segments: list[pb.OutputSegment]
    placed: list[str]
    deltas: int


def generate_request(request_id: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> pb.GenerateRequest:
    """A request for output, final-only unless said otherwise."""
    fields.setdefault("max_tokens", 1000)
    fields.setdefault("delta_tokens", 0)
    return pb.GenerateRequest(run_id=RUN, request_id=request_id, prompt_token_ids=prompt, **fields)


async def generate(engine: Engine, request_id: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Output:
    """Generate one output."""
    output = Output([], "", [], [], 0)
    async for response in engine.stub.Generate(generate_request(request_id, prompt, **fields)):
        match response.WhichOneof("event"):
            case "placed":
                output.placed.append(response.placed.replica_id + (" parked" if response.placed.parked else ""))
            case "delta":
                output.tokens += response.delta.token_ids
                output.deltas += 1
            case "done":
                output.tokens += response.done.rest.token_ids
                output.finish = pb.FinishReason.Name(response.done.finish_reason).removeprefix("FINISH_REASON_")
                output.segments = list(response.done.segments)
    return output


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout: float = 10.0) -> None:
    """Wait until a condition holds that no event tells of."""
    async with asyncio.timeout(timeout):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.005)


async def serving(engine: Engine) -> bool:
    """What gRPC health says."""
    async with grpc.aio.insecure_channel(engine.host.target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return bool((await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING)
