"""Calls that settle trajectories and groups."""

from collections.abc import AsyncIterator, Iterable

from services.buffer.domain import results
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.partition import Partition
from services.buffer.domain.run import Run
from services.buffer.servicers.base import BufferCalls, Context, each, optional_epoch
from services.buffer.wire.groups import failure_from, progress_from, result_from
from services.runtime.errors import invalid_argument
from turnout.buffer.v1 import buffer_pb2 as pb


class ResultCalls(BufferCalls):
    """FinishTrajectories, FinishStream, FailTrajectories, FinishGroup, FailGroup, ReportProgress."""

    def _finish(self, run: Run, partition: Partition, items: Iterable[pb.TrajectoryResult]) -> list[pb.ItemOutcome]:
        at = self.desk.moment()
        outcomes = each(items, lambda item: results.finish(partition, result_from(item), at))
        self.desk.changed(run, partition)
        return outcomes

    async def FinishTrajectories(
        self, request: pb.FinishTrajectoriesRequest, context: Context
    ) -> pb.FinishTrajectoriesResponse:
        """Settle trajectories with their results."""
        await self.store.room()
        run, partition = self.place(request.run_id, request.partition)

        def execute() -> pb.FinishTrajectoriesResponse:
            return pb.FinishTrajectoriesResponse(outcomes=self._finish(run, partition, request.results))

        return await self.once(request.run_id, "FinishTrajectories", request, request.request_id, execute)

    async def FinishStream(
        self, requests: AsyncIterator[pb.FinishStreamRequest], context: Context
    ) -> AsyncIterator[pb.FinishStreamResponse]:
        """Settle numbered batches, each answered in order."""
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
            last = batch.sequence
            await self.store.room()
            run, partition = self.place(header.run_id, header.partition)
            yield pb.FinishStreamResponse(sequence=batch.sequence, outcomes=self._finish(run, partition, batch.results))

    async def FailTrajectories(
        self, request: pb.FailTrajectoriesRequest, context: Context
    ) -> pb.FailTrajectoriesResponse:
        """Report failed attempts."""
        await self.store.room()
        run, partition = self.place(request.run_id, request.partition)

        def execute() -> pb.FailTrajectoriesResponse:
            at = self.desk.moment()
            outcomes = each(request.failures, lambda item: results.fail(partition, failure_from(item), at))
            self.desk.changed(run, partition)
            return pb.FailTrajectoriesResponse(outcomes=outcomes)

        return await self.once(request.run_id, "FailTrajectories", request, request.request_id, execute)

    async def FinishGroup(self, request: pb.FinishGroupRequest, context: Context) -> pb.FinishGroupResponse:
        """Close a group with the trajectories it has."""
        run, partition = self.place(request.run_id, request.partition)
        trainer = self._trainer(run, request)

        def execute() -> pb.FinishGroupResponse:
            finished = results.finish_group(partition, request.group_id, self.desk.moment())
            self._settled(run, partition, trainer=trainer)
            return pb.FinishGroupResponse(finished_trajectories=finished)

        return await self.once(request.run_id, "FinishGroup", request, request.request_id, execute)

    async def FailGroup(self, request: pb.FailGroupRequest, context: Context) -> pb.FailGroupResponse:
        """Fail a whole group."""
        run, partition = self.place(request.run_id, request.partition)
        trainer = self._trainer(run, request)

        def execute() -> pb.FailGroupResponse:
            results.fail_group(partition, request.group_id, request.error, self.desk.moment())
            self._settled(run, partition, trainer=trainer)
            return pb.FailGroupResponse()

        return await self.once(request.run_id, "FailGroup", request, request.request_id, execute)

    @staticmethod
    def _trainer(run: Run, request: pb.FinishGroupRequest | pb.FailGroupRequest) -> bool:
        """Whether the caller is the trainer; without an epoch it is a worker, whose word holds under any."""
        epoch = optional_epoch(request)
        if epoch is None:
            return False
        run.check_epoch(epoch)
        return True

    def _settled(self, run: Run, partition: Partition, *, trainer: bool) -> None:
        if trainer:
            self.desk.contact(run)
        self.desk.changed(run, partition)

    async def ReportProgress(self, request: pb.ReportProgressRequest, context: Context) -> pb.ReportProgressResponse:
        """Note how far running trajectories are."""
        run, partition = self.place(request.run_id, request.partition)
        at = self.desk.moment()
        events: list[GroupEvent] = []

        def report(item: pb.TrajectoryProgress) -> None:
            events.append(results.report_progress(partition, progress_from(item), at))

        outcomes = each(request.progress, report)
        self.desk.tell(run, events)
        return pb.ReportProgressResponse(outcomes=outcomes)
