"""A scheduler over real sockets between a scripted buffer and a scripted engine controller, and a trainer for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import ServiceHost
from services.runtime.statuses import from_rpc_error
from services.scheduler import policies
from services.scheduler.domain.config import PolicyFactory
from services.scheduler.service import build
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.fakes import FakeBuffer, FakeEngine, host_buffer, host_engine
from turnout.scheduler.v1 import events_pb2, scheduler_pb2_grpc
from turnout.scheduler.v1 import scheduler_pb2 as pb

RUN = "run"


def run_config(*, on: bool = True, **changes: Any) -> pb.RunConfig:
    """4 groups per mini-batch, 4 mini-batches per step, threshold 0.5 x 16 = 8 of policy `verl`."""
    values: dict[str, Any] = {
        "switch": pb.SwitchConfig(enable_switch=on, switch_threshold_ratio=0.5),
        "policy": "verl",
        "train_batch_size": 16,
        "parameter_sync_step": 4,
        "mini_batch_size": 4,
        "total_training_steps": 10,
        "hybrid_gpus": 2,
        "standalone_gpus": 2,
    }
    return pb.RunConfig(**{**values, **changes})


def wall(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


async def error_of(awaitable: Any) -> TurnoutError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return from_rpc_error(caught.value)


async def rest_of(stream: Any) -> list[Any]:
    """The events that are still to come."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


@dataclass
class Trainer:
    """Calls of one epoch."""

    stub: scheduler_pb2_grpc.SwitchSchedulerAsyncStub
    epoch: int
    run_id: str = RUN
    cursor: int = 0

    def _who(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "epoch": self.epoch}

    async def complete(self, lend: pb.Lend, hybrid: float = 3.0, standalone: float = 2.0) -> pb.CompleteLendResponse:
        return await self.stub.CompleteLend(
            pb.CompleteLendRequest(
                lend_id=lend.lend_id,
                hybrid_update=wall(hybrid),
                standalone_update=wall(standalone),
                **self._who(),
            )
        )

    async def abandon(self, lend: pb.Lend, reason: str = "broken") -> pb.AbandonLendResponse:
        return await self.stub.AbandonLend(pb.AbandonLendRequest(lend_id=lend.lend_id, reason=reason, **self._who()))

    async def begin(self, step: int) -> pb.BeginStepResponse:
        return await self.stub.BeginStep(pb.BeginStepRequest(step=step, **self._who()))

    def prepare_stream(self, step: int, attempt: int = 0, max_wait: float | None = None, cursor: int = 0) -> Any:
        return self.stub.PrepareStep(
            pb.PrepareStepRequest(
                step=step,
                attempt=attempt,
                cursor=cursor,
                max_wait=None if max_wait is None else wall(max_wait),
                **self._who(),
            )
        )

    async def prepare(self, step: int, attempt: int = 0, max_wait: float | None = None) -> pb.PrepareStepDone:
        events: list[pb.PrepareStepResponse] = [e async for e in self.prepare_stream(step, attempt, max_wait)]
        return events[-1].done

    def sample_stream(self, step: int, mini_batch: int, attempt: int = 0, max_wait: float | None = None) -> Any:
        return self.stub.BeginSample(
            pb.BeginSampleRequest(
                step=step,
                mini_batch=mini_batch,
                attempt=attempt,
                max_wait=None if max_wait is None else wall(max_wait),
                **self._who(),
            )
        )

    async def begin_sample(
        self, step: int, mini_batch: int, attempt: int = 0, max_wait: float | None = None
    ) -> pb.BeginSampleDone:
        events: list[pb.BeginSampleResponse] = [
            e async for e in self.sample_stream(step, mini_batch, attempt, max_wait)
        ]
        return events[-1].done

    async def end_sample(self, step: int, mini_batch: int, wait: float = 0.0) -> None:
        await self.stub.EndSample(pb.EndSampleRequest(step=step, mini_batch=mini_batch, wait=wall(wait), **self._who()))

    async def sample(self, step: int, mini_batch: int, wait: float = 0.0) -> pb.BeginSampleDone:
        done = await self.begin_sample(step, mini_batch)
        await self.end_sample(step, mini_batch, wait)
        return done

    async def end(self, step: int) -> pb.EndStepResponse:
        return await self.stub.EndStep(pb.EndStepRequest(step=step, **self._who()))

    async def begin_validation(self, step: int) -> pb.BeginValidationResponse:
        return await self.stub.BeginValidation(pb.BeginValidationRequest(step=step, **self._who()))

    async def end_validation(self, step: int) -> None:
        await self.stub.EndValidation(pb.EndValidationRequest(step=step, **self._who()))

    async def save(self, step: int) -> pb.SaveResponse:
        return await self.stub.Save(pb.SaveRequest(step=step, **self._who()))

    async def heartbeat(self) -> pb.HeartbeatResponse:
        return await self.stub.Heartbeat(pb.HeartbeatRequest(**self._who()))

    async def run(self) -> pb.Run:
        return (await self.stub.GetRun(pb.GetRunRequest(run_id=self.run_id))).run

    async def step(self, step: int, wait: float = 0.0) -> pb.EndStepResponse:
        """A whole step; the wait is that of its first mini-batch."""
        await self.begin(step)
        await self.prepare(step)
        for mini_batch in range(4):
            await self.sample(step, mini_batch, wait if mini_batch == 0 else 0.0)
        return await self.end(step)

    async def events(self) -> list[events_pb2.RunEvent]:
        """Every event so far."""
        request = pb.WatchRunRequest(run_id=self.run_id, from_sequence=1, no_follow=True)
        return [event async for batch in self.stub.WatchRun(request) for event in batch.events]


@dataclass
class World:
    """All that a test acts on."""

    host: ServiceHost
    stub: scheduler_pb2_grpc.SwitchSchedulerAsyncStub
    buffer: FakeBuffer
    engine: FakeEngine
    buffer_host: ServiceHost
    engine_host: ServiceHost
    journal: list[str] = field(default_factory=list)
    start: Callable[[str], Awaitable[ServiceHost]] | None = None

    async def restart(self) -> None:
        """Stop the scheduler in order, and start another one on its directory, under its address."""
        target = self.host.target
        await self.host.stop()
        assert self.start is not None
        self.host = await self.start(target)

    def open_request(self, config: pb.RunConfig | None = None, **changes: Any) -> pb.OpenRunRequest:
        values: dict[str, Any] = {
            "run_id": RUN,
            "config": config or run_config(),
            "buffer_target": self.buffer_host.target,
            "engine_target": self.engine_host.target,
        }
        return pb.OpenRunRequest(**{**values, **changes})

    async def open(self, config: pb.RunConfig | None = None, **changes: Any) -> pb.OpenRunResponse:
        return await self.stub.OpenRun(self.open_request(config, **changes))

    async def trainer(self, config: pb.RunConfig | None = None, **changes: Any) -> Trainer:
        """A trainer whose lend of the start is complete."""
        opened = await self.open(config, **changes)
        trainer = Trainer(self.stub, opened.epoch, opened.run.run_id)
        if opened.HasField("lend"):
            await trainer.complete(opened.lend)
        return trainer

    def moves(self) -> list[str]:
        """The calls that moved GPUs, in order, since the last look."""
        moves = [call for call in self.journal if call in ("BeginLend", "FinishLend", "AbortLend", "Reclaim")]
        self.journal.clear()
        return moves


@asynccontextmanager
async def world(
    *, hybrids: int = 2, clock: Clock | None = None, create: PolicyFactory = policies.create, **settings: Any
) -> AsyncIterator[World]:
    """Everything, started."""
    journal: list[str] = []
    # They leave out the calls that the scheduler does not make; those are UNIMPLEMENTED.
    buffer, engine = FakeBuffer(journal), FakeEngine(journal)  # type: ignore[abstract]
    buffer.add_run(RUN)
    for number in range(hybrids):
        engine.add(f"hybrid-{number}")
    engine.add("standalone-0", hybrid=False)
    values = {"transition_backoff_s": 0.0, "reclaim_patience_s": 0.0, "peer_backoff_s": 0.01, **settings}
    chosen = SchedulerSettings(listen=["127.0.0.1:0"], **values)
    async with AsyncExitStack() as stack:
        buffer_host = await stack.enter_async_context(host_buffer(buffer))
        engine_host = await stack.enter_async_context(host_engine(engine))

        async def start(listen: str) -> ServiceHost:
            host = build(chosen.model_copy(update={"listen": [listen]}), clock, create)
            return await stack.enter_async_context(host)

        host = await start("127.0.0.1:0")
        direct = [("grpc.enable_http_proxy", 0), ("grpc.initial_reconnect_backoff_ms", 20)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(host.target, options=direct))
        stub: scheduler_pb2_grpc.SwitchSchedulerAsyncStub = scheduler_pb2_grpc.SwitchSchedulerStub(channel)
        yield World(host, stub, buffer, engine, buffer_host, engine_host, journal, start)
