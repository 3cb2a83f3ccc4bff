"""A buffer in process over a real socket, and a caller that speaks to it through the raw stub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from services.buffer.desk import Desk
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.memory import Memory
from services.buffer.service import BufferService, build
from services.buffer.settings import BufferSettings
from services.buffer.storage.externals import ExternalsImaging
from services.buffer.storage.imaging import RunImaging
from services.buffer.storage.loading import load
from services.buffer.storage.schema import SCHEMA
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError
from services.runtime.host import ServiceHost
from services.runtime.journal import open_journal
from services.runtime.statuses import from_rpc_error
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.buffer.v1 import buffer_pb2_grpc

RUN = "run"
# Above what any test needs; a call that hangs fails here and not at the time limit of the test.
CALL_S = 20.0


def seconds(value: float) -> Duration:
    """A protobuf Duration."""
    made = Duration()
    made.FromNanoseconds(round(value * 1e9))
    return made


def output(reward: float = 0.0, tokens: int = 1, version: int | None = None, payload: bytes | None = None) -> pb.Output:
    """One output with one segment and the reward "reward"."""
    made = pb.Output(segments=[pb.Segment(tokens=tokens, weight_version=version)], rewards={"reward": reward})
    if payload is not None:
        made.payload.inline = payload
    return made


def result(group_id: str, index: int, *outputs: pb.Output, token: pb.ClaimToken | None = None) -> pb.TrajectoryResult:
    """A result; with one plain output unless told otherwise."""
    return pb.TrajectoryResult(group_id=group_id, index=index, outputs=outputs or (output(),), token=token)


@dataclass
class Told:
    """Everything a wait said."""

    events: list[Any] = field(default_factory=list)

    @property
    def done(self) -> Any:
        assert self.events[-1].WhichOneof("event") == "done", "the stream ended without a final event"
        return self.events[-1].done

    @property
    def outcome(self) -> str:
        return pb.WaitOutcome.Name(self.done.outcome).removeprefix("WAIT_OUTCOME_")

    @property
    def refills(self) -> list[pb.RefillDue]:
        return [event.refill_due for event in self.events if event.WhichOneof("event") == "refill_due"]

    @property
    def groups(self) -> list[pb.SampledGroup]:
        parts = [event.groups for event in self.events if event.WhichOneof("event") == "groups"]
        return [group for part in parts for group in part.groups]

    @property
    def ids(self) -> list[str]:
        return [group.group_id for group in self.groups]


class Caller:
    """Trainer, worker and reader of one run; `epoch` None until one is opened."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str = RUN, partition: str = "train") -> None:
        self.stub: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(channel)
        self.run_id = run_id
        self.partition = partition
        self.epoch: int | None = None

    @property
    def place(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "partition": self.partition}

    async def create(self, *, size: int = 1, **config: Any) -> pb.Run:
        partitions = [
            pb.PartitionConfig(name="train", default_group_size=size),
            pb.PartitionConfig(name="val", kind=pb.PARTITION_KIND_VALIDATION, default_group_size=size),
        ]
        made = pb.RunConfig(**{"partitions": partitions, **config})
        answer = await self.stub.CreateRun(pb.CreateRunRequest(run_id=self.run_id, config=made), timeout=CALL_S)
        return answer.run

    async def open(self) -> int:
        answer = await self.stub.OpenEpoch(pb.OpenEpochRequest(run_id=self.run_id), timeout=CALL_S)
        self.epoch = answer.epoch
        return answer.epoch

    async def add(
        self, *group_ids: str, step: int = 0, size: int | None = None, prompt: bytes | None = None, **rest: Any
    ) -> pb.AddGroupsResponse:
        groups = [
            pb.GroupSpec(
                group_id=group_id,
                group_size=size,
                prompt=None if prompt is None else pb.Payload(inline=prompt),
                tags={"of": group_id},
            )
            for group_id in group_ids
        ]
        request = pb.AddGroupsRequest(**self.place, epoch=self.epoch, step=step, groups=groups, **rest)
        return await self.stub.AddGroups(request, timeout=CALL_S)

    async def claim(self, limit: int = 1, max_wait: float = 0.0, worker: str = "w", **rest: Any) -> list[pb.Claim]:
        request = pb.ClaimGroupsRequest(
            **self.place, worker_id=worker, max_trajectories=limit, max_wait=seconds(max_wait), **rest
        )
        return list((await self.stub.ClaimGroups(request, timeout=CALL_S)).claims)

    async def finish(self, *results: pb.TrajectoryResult, request_id: str = "") -> list[pb.ItemOutcome]:
        request = pb.FinishTrajectoriesRequest(**self.place, results=results, request_id=request_id)
        return list((await self.stub.FinishTrajectories(request, timeout=CALL_S)).outcomes)

    async def finish_claim(self, claim: pb.Claim, *outputs: pb.Output) -> None:
        results = [result(claim.group_id, item.index, *outputs, token=claim.token) for item in claim.trajectories]
        assert {outcome.code for outcome in await self.finish(*results)} == {0}

    async def finish_new(self, *group_ids: str, step: int = 0, rewards: Sequence[float] = (0.0,)) -> None:
        """Add groups and finish them, with one reward per trajectory."""
        await self.add(*group_ids, step=step, size=len(rewards))
        results = [
            result(group_id, index, output(reward)) for group_id in group_ids for index, reward in enumerate(rewards)
        ]
        assert {outcome.code for outcome in await self.finish(*results)} == {0}

    async def fail(
        self,
        claim: pb.Claim,
        kind: pb.FailureKind.ValueType = pb.FAILURE_KIND_RETRYABLE,
        partial: Iterable[pb.Output] = (),
        error: str = "boom",
    ) -> list[pb.ItemOutcome]:
        kept = list(partial)
        failures = [
            pb.TrajectoryFailure(
                token=claim.token,
                group_id=claim.group_id,
                index=item.index,
                kind=kind,
                error=error,
                partial=pb.PartialOutput(outputs=kept) if kept else None,
            )
            for item in claim.trajectories
        ]
        request = pb.FailTrajectoriesRequest(**self.place, failures=failures)
        return list((await self.stub.FailTrajectories(request, timeout=CALL_S)).outcomes)

    def wait_call(self, target: int, step: int = 0, max_wait: float | None = 0.0, **rest: Any) -> Any:
        request = pb.WaitForSampleableRequest(
            **{"epoch": self.epoch, **self.place, **rest},
            step=step,
            target=target,
            max_wait=None if max_wait is None else seconds(max_wait),
        )
        return self.stub.WaitForSampleable(request, timeout=CALL_S)

    def sample_call(self, batch: int, step: int = 0, max_wait: float | None = 0.0, **rest: Any) -> Any:
        request = pb.SampleRequest(
            **{"epoch": self.epoch, **self.place, **rest},
            step=step,
            batch=batch,
            max_wait=None if max_wait is None else seconds(max_wait),
        )
        return self.stub.Sample(request, timeout=CALL_S)

    async def wait(self, target: int, step: int = 0, max_wait: float | None = 0.0, **rest: Any) -> Told:
        return Told([event async for event in self.wait_call(target, step, max_wait, **rest)])

    async def sample(self, batch: int, step: int = 0, max_wait: float | None = 0.0, **rest: Any) -> Told:
        return Told([event async for event in self.sample_call(batch, step, max_wait, **rest)])

    async def commit(self, lease_id: str) -> list[str]:
        request = pb.CommitSampleRequest(run_id=self.run_id, epoch=self.epoch, lease_id=lease_id)
        return list((await self.stub.CommitSample(request, timeout=CALL_S)).group_ids)

    async def take(self, batch: int, step: int = 0) -> list[str]:
        """Sample and commit."""
        told = await self.sample(batch, step)
        assert told.outcome == "REACHED"
        return await self.commit(told.done.lease_id)

    async def depth(self, step: int | None = None) -> pb.Depth:
        request = pb.GetSampleableCountRequest(**self.place, step=step)
        return (await self.stub.GetSampleableCount(request, timeout=CALL_S)).depth

    async def group(self, group_id: str) -> pb.Group:
        return (await self.stub.GetGroup(pb.GetGroupRequest(**self.place, group_id=group_id), timeout=CALL_S)).group

    async def groups(self, *states: pb.GroupState.ValueType) -> list[pb.Group]:
        request = pb.ListGroupsRequest(**self.place, states=states, page_size=1000)
        return list((await self.stub.ListGroups(request, timeout=CALL_S)).groups)

    async def ledger(self) -> pb.GetLedgerResponse:
        ledger = await self.stub.GetLedger(pb.GetLedgerRequest(**self.place), timeout=CALL_S)
        present = ledger.present
        there = present.pending + present.running + present.finished + present.failed + present.sampled
        assert ledger.added == ledger.committed + ledger.evicted + there
        return ledger

    async def evict(self, *group_ids: str, refill: bool = False) -> pb.EvictGroupsResponse:
        request = pb.EvictGroupsRequest(**self.place, epoch=self.epoch, group_ids=group_ids, refill=refill)
        return await self.stub.EvictGroups(request, timeout=CALL_S)

    async def put(self, data: bytes, crc32c: int, chunk: int = 1 << 20) -> pb.PutPayloadResponse:
        async def frames() -> AsyncIterator[pb.PutPayloadRequest]:
            yield pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id=self.run_id, size=len(data)))
            for start in range(0, len(data), chunk):
                yield pb.PutPayloadRequest(chunk=data[start : start + chunk])
            yield pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=crc32c))

        return await self.stub.PutPayload(frames(), timeout=CALL_S)

    async def get(self, *refs: pb.PayloadRef, lease_id: str = "", **rest: Any) -> list[bytes]:
        """The bytes of references, one after the other, as they stream in."""
        request = pb.GetPayloadsRequest(run_id=self.run_id, lease_id=lease_id, refs=refs, **rest)
        found: list[bytes] = []
        async for answer in self.stub.GetPayloads(request, timeout=CALL_S):
            if answer.HasField("header"):
                found.append(b"")
            elif answer.HasField("chunk"):
                found[-1] += answer.chunk
        return found

    async def checkpoint(self, checkpoint_id: str = "", step: int = 0) -> pb.CheckpointResponse:
        request = pb.CheckpointRequest(run_id=self.run_id, epoch=self.epoch, step=step, checkpoint_id=checkpoint_id)
        return await self.stub.Checkpoint(request, timeout=CALL_S)

    async def restore(self, checkpoint_id: str, request_id: str = "") -> pb.RestoreResponse:
        request = pb.RestoreRequest(
            run_id=self.run_id, epoch=self.epoch, checkpoint_id=checkpoint_id, request_id=request_id
        )
        return await self.stub.Restore(request, timeout=CALL_S)

    async def checkpoints(self) -> list[pb.CheckpointInfo]:
        request = pb.ListCheckpointsRequest(run_id=self.run_id)
        return list((await self.stub.ListCheckpoints(request, timeout=CALL_S)).checkpoints)

    async def verify(self, checkpoint_id: str) -> pb.CheckpointInfo:
        request = pb.VerifyCheckpointRequest(run_id=self.run_id, checkpoint_id=checkpoint_id)
        return (await self.stub.VerifyCheckpoint(request, timeout=CALL_S)).checkpoint


@dataclass
class Buffer:
    """A running buffer."""

    host: ServiceHost
    channel: grpc.aio.Channel

    @property
    def desk(self) -> Desk:
        service = self.host.service
        assert isinstance(service, BufferService)
        return service.desk

    def caller(self, run_id: str = RUN, partition: str = "train") -> Caller:
        return Caller(self.channel, run_id, partition)

    async def until_parked(self, count: int, run_id: str = RUN) -> None:
        """Return once so many calls are parked on the run."""
        async with asyncio.timeout(CALL_S):
            # Parking is counted, not announced.
            while self.desk.parking(self.desk.runs.require(run_id)).parked != count:  # noqa: ASYNC110
                await asyncio.sleep(0)


@asynccontextmanager
async def checked_buffer(clock: Clock | None = None, **settings: Any) -> AsyncIterator[Buffer]:
    """A buffer that keeps what it knows; in the end a replay of that must come to the same."""
    with TemporaryDirectory() as directory:
        async with running_buffer(clock, data_dir=Path(directory), **settings) as running:
            yield running
            known = knowledge(running.desk.memory)
        journal = await open_journal(Path(directory) / "journal", schema=SCHEMA)
        memory = await load(journal, MemoryPayloadStore())
        await journal.close()
    # What the end of the service let go (waits, undelivered batches) is decided after the last look.
    assert [run.run_id for run in memory.runs] == [run.run_id for run in running.desk.memory.runs]
    assert knowledge(memory) == knowledge(running.desk.memory) or knowledge(memory) == known


@asynccontextmanager
async def running_buffer(clock: Clock | None = None, **settings: Any) -> AsyncIterator[Buffer]:
    """A buffer on a free port, and a channel to it."""
    chosen = BufferSettings(**{"listen": ["127.0.0.1:0"], "grace_s": 2.0, **settings})
    async with (
        build(chosen, clock) as host,
        grpc.aio.insecure_channel(host.target, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        yield Buffer(host, channel)


async def refused(call: Awaitable[object]) -> TurnoutError:
    """The error a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def refused_stream(call: Any) -> TurnoutError:
    """The error a stream ends with."""

    async def drain() -> None:
        async for _ in call:
            pass

    return await refused(drain())


def snapshot(buffer: Buffer) -> Any:
    """All that a call may change, as text to compare."""
    runs = []
    for run in buffer.desk.runs:
        state = run.state
        runs.append(
            (
                run.run_id,
                state.config,
                state.epoch,
                state.step,
                state.contact_at,
                state.events.next_sequence,
                state.payloads.held,
                len(state.claims),
                sorted((lease.lease_id, lease.state) for lease in state.leases.live.values()),
                [
                    (
                        name,
                        partition.ledger(),
                        partition.supply_ended,
                        [
                            (
                                group.group_id,
                                group.state,
                                group.born,
                                [(t.state, t.attempt, t.failures, t.done) for t in group.trajectories],
                            )
                            for group in partition.groups.values()
                        ],
                    )
                    for name, partition in run.partitions.items()
                ],
            )
        )
    return runs


def knowledge(memory: Memory) -> list[str]:
    """Every part of the image of every run, in a fixed order, without the prefix of ids that a start changes."""
    lines: list[str] = []
    for run_id, book in sorted(memory.externals):
        if not book.unused:
            lines += map(str, ExternalsImaging(run_id, book).parts())
    for run in memory.runs:
        imaging = RunImaging(run, {call: answers.kept(run.run_id) for call, answers in memory.answers.items()})
        for payloads, part in imaging.parts():
            imaging.release(payloads)
            copy = st.Part.FromString(part.SerializeToString())
            if copy.HasField("run"):
                copy.run.id_prefix = ""
            if copy.HasField("answers"):
                for answer in copy.answers.answers:
                    # The moment of the call, or that of its decision a little later.
                    answer.at = 0.0
            lines.append(str(copy))
    return lines
