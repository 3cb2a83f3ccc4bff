"""Calls that settle trajectories and groups."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from services.buffer import commands
from services.buffer.commands import each
from services.buffer.domain import results
from services.buffer.domain.config import MAX_ITEMS_PER_CALL, check_items
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.run import Run
from services.buffer.servicers.base import BufferCalls, Context, optional_epoch
from services.buffer.wire.groups import progress_from
from services.runtime.errors import invalid_argument
from services.runtime.journal import Durable
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

# Batches of a FinishStream that are settled and not answered yet: enough to decode and settle the next ones while the
# disk confirms one, and few enough that a stream whose answers nobody reads holds little.
BATCHES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class _SettledBatch:
    """A batch of a FinishStream, with what must be kept before it is answered."""

    answer: pb.FinishStreamResponse
    promise: Durable | None


class ResultCalls(BufferCalls):
    """FinishTrajectories, FinishStream, FailTrajectories, FinishGroup, FailGroup, ReportProgress."""

    def _settled(self, run: Run, record: st.Record, outcomes: Iterable[pb.ItemOutcome], let_go: int) -> bool:
        """Whether a batch had an effect that must be recorded. `let_go`: external payloads let go before it."""
        return self.desk.journal is not None and (
            bool(record.request_id)
            or any(not outcome.code for outcome in outcomes)
            or run.state.payloads.external.let_go_ever != let_go
        )

    async def FinishTrajectories(
        self, request: pb.FinishTrajectoriesRequest, context: Context
    ) -> pb.FinishTrajectoriesResponse:
        """Settle trajectories with their results."""
        await self.admit("FinishTrajectories", request.run_id, request.request_id)
        run, partition = self.place(request.run_id, request.partition)
        check_items("results", len(request.results), MAX_ITEMS_PER_CALL)

        def execute(record: st.Record) -> pb.FinishTrajectoriesResponse:
            at = self.desk.moment()
            let_go = run.state.payloads.external.let_go_ever
            outcomes = commands.finish(partition, request.results, at)
            if self._settled(run, record, outcomes, let_go):
                record.finish_trajectories = request.SerializeToString()
                self.desk.record(run, record, at)
            self.desk.changed(run, partition)
            return pb.FinishTrajectoriesResponse(outcomes=outcomes)

        return await self.once(request.run_id, "FinishTrajectories", request, request.request_id, execute)

    async def FinishStream(
        self, requests: AsyncIterator[pb.FinishStreamRequest], context: Context
    ) -> AsyncIterator[pb.FinishStreamResponse]:
        """Settle numbered batches, each answered in order, while the disk confirms those before."""
        settled: asyncio.Queue[_SettledBatch | None] = asyncio.Queue()
        room = asyncio.Semaphore(BATCHES_AHEAD)

        async def settle() -> None:
            try:
                async with aclosing(self._settle_all(requests)) as batches:
                    async for batch in batches:
                        settled.put_nowait(batch)
                        await room.acquire()
            finally:
                # What went wrong, if anything, is told behind the answers to what went well.
                settled.put_nowait(None)

        settling = asyncio.create_task(settle())
        try:
            while (batch := await settled.get()) is not None:
                if batch.promise is not None:
                    await batch.promise
                yield batch.answer
                room.release()
            await settling
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _settle_all(self, requests: AsyncIterator[pb.FinishStreamRequest]) -> AsyncGenerator[_SettledBatch, None]:
        header: pb.FinishStreamHeader | None = None
        last = -1
        while True:
            try:
                frame = await self.draining.race(anext(requests))
            except StopAsyncIteration:
                return
            kind = frame.WhichOneof("frame")
            if kind is None or (kind == "header") is not (header is None):
                message = "the first frame is a header, and every later one a batch"
                raise invalid_argument("frame", message, value=kind, reason="BAD_FRAME")
            if kind == "header":
                header = frame.header
                self.place(header.run_id, header.partition)
                continue
            assert header is not None
            batch = frame.batch
            if batch.sequence <= last:
                message = f"sequence must rise: {batch.sequence} follows {last}"
                raise invalid_argument("batch.sequence", message, value=batch.sequence, reason="OUT_OF_RANGE")
            check_items("batch.results", len(batch.results), MAX_ITEMS_PER_CALL)
            last = batch.sequence
            await self.admit()
            yield self._settle(header, batch)

    def _settle(self, header: pb.FinishStreamHeader, batch: pb.FinishStreamBatch) -> _SettledBatch:
        run, partition = self.place(header.run_id, header.partition)
        at = self.desk.moment()
        let_go = run.state.payloads.external.let_go_ever
        outcomes = commands.finish(partition, batch.results, at)
        if self._settled(run, st.Record(), outcomes, let_go):
            said = st.FinishBatch(partition=partition.name, batch=batch.SerializeToString())
            self.desk.record(run, st.Record(finish_batch=said), at)
        self.desk.changed(run, partition)
        answer = pb.FinishStreamResponse(sequence=batch.sequence, outcomes=outcomes)
        return _SettledBatch(answer, self.desk.promise())

    async def FailTrajectories(
        self, request: pb.FailTrajectoriesRequest, context: Context
    ) -> pb.FailTrajectoriesResponse:
        """Report failed attempts."""
        await self.admit("FailTrajectories", request.run_id, request.request_id)
        run, partition = self.place(request.run_id, request.partition)
        check_items("failures", len(request.failures), MAX_ITEMS_PER_CALL)

        def execute(record: st.Record) -> pb.FailTrajectoriesResponse:
            at = self.desk.moment()
            let_go = run.state.payloads.external.let_go_ever
            answer = commands.fail(run, request, at)
            if self._settled(run, record, answer.outcomes, let_go):
                record.fail_trajectories = request.SerializeToString()
                self.desk.record(run, record, at)
            self.desk.changed(run, partition)
            return answer

        return await self.once(request.run_id, "FailTrajectories", request, request.request_id, execute)

    async def FinishGroup(self, request: pb.FinishGroupRequest, context: Context) -> pb.FinishGroupResponse:
        """Close a group with the trajectories it has."""
        run, partition = self.place(request.run_id, request.partition)
        trainer = self._trainer(run, request)

        def execute(record: st.Record) -> pb.FinishGroupResponse:
            at = self.desk.moment()
            answer = commands.finish_group(run, request, at)
            record.finish_group = request.SerializeToString()
            self._closed(run, partition, record, at, trainer=trainer)
            return answer

        return await self.once(request.run_id, "FinishGroup", request, request.request_id, execute)

    async def FailGroup(self, request: pb.FailGroupRequest, context: Context) -> pb.FailGroupResponse:
        """Fail a whole group."""
        run, partition = self.place(request.run_id, request.partition)
        trainer = self._trainer(run, request)

        def execute(record: st.Record) -> pb.FailGroupResponse:
            at = self.desk.moment()
            answer = commands.fail_group(run, request, at)
            record.fail_group = request.SerializeToString()
            self._closed(run, partition, record, at, trainer=trainer)
            return answer

        return await self.once(request.run_id, "FailGroup", request, request.request_id, execute)

    @staticmethod
    def _trainer(run: Run, request: pb.FinishGroupRequest | pb.FailGroupRequest) -> bool:
        """Whether the caller is the trainer; without an epoch it is a worker, whose word holds under any."""
        epoch = optional_epoch(request)
        if epoch is None:
            return False
        run.check_epoch(epoch)
        return True

    def _closed(self, run: Run, partition: Partition, record: st.Record, at: Moment, *, trainer: bool) -> None:
        self.desk.record(run, record, at)
        if trainer:
            self.desk.contact(run)
        self.desk.changed(run, partition)

    async def ReportProgress(self, request: pb.ReportProgressRequest, context: Context) -> pb.ReportProgressResponse:
        """Note how far running trajectories are."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        check_items("progress", len(request.progress), MAX_ITEMS_PER_CALL)
        at = self.desk.moment()
        events: list[GroupEvent] = []

        def report(item: pb.TrajectoryProgress) -> None:
            events.append(results.report_progress(partition, progress_from(item), at))

        outcomes = each(request.progress, report)
        await self.desk.durable()
        self.desk.tell(run, events)
        return pb.ReportProgressResponse(outcomes=outcomes)
