"""Calls on runs and epochs."""

from services.buffer.domain.run import Run
from services.buffer.servicers.base import BufferCalls, Context, optional_epoch
from services.buffer.storage.letting_go import let_go
from services.buffer.wire.config import config_from, config_to, run_to
from services.runtime.errors import require_id
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


class RunCalls(BufferCalls):
    """CreateRun, GetRun, UpdateRun, DeleteRun, ListRuns, OpenEpoch, RenewEpoch."""

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        """Declare a run; with the configuration it has already, a no-op."""
        require_id("run_id", request.run_id)
        self.desk.check()
        self.desk.check_space()

        def execute(record: st.Record) -> pb.CreateRunResponse:
            config = config_from(request.config)
            config.validate()
            run = self.desk.runs.get(request.run_id)
            if run is None or run.state.config != config:
                run = self.desk.create(request.run_id, config, record)
            return pb.CreateRunResponse(run=run_to(run))

        return await self.once(request.run_id, "CreateRun", request, request.request_id, execute)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Read a run."""
        response = pb.GetRunResponse(
            run=run_to(self.run(request.run_id)),
            incarnation=self.desk.incarnation,
            time_scale=self.desk.clock.scale,
        )
        await self.desk.durable()
        return response

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        """Replace the mutable parts of a configuration."""
        run = self.run(request.run_id)
        run.check_epoch(optional_epoch(request))

        def execute(record: st.Record) -> pb.UpdateRunResponse:
            run.update(config_from(request.config))
            record.update_run.CopyFrom(config_to(run.state.config))
            self.desk.record(run, record, self.desk.moment())
            self.desk.contact(run)
            self.desk.changed(run, *run.partitions.values())
            return pb.UpdateRunResponse(run=run_to(run))

        return await self.once(request.run_id, "UpdateRun", request, request.request_id, execute)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        """Forget a run and everything in it."""

        deleted: list[Run] = []

        def execute(record: st.Record) -> pb.DeleteRunResponse:
            run = self.run(request.run_id)
            run.check_epoch(optional_epoch(request))
            self.desk.delete(run, record)
            deleted.append(run)
            return pb.DeleteRunResponse()

        # Kept apart from the answers of the run, which end with it: a run id is never empty.
        try:
            return await self.once("", "DeleteRun", request, request.request_id, execute)
        finally:
            for run in deleted:
                await let_go(run)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """List all runs."""
        self.desk.check()
        response = pb.ListRunsResponse(runs=[run_to(run) for run in self.desk.runs])
        await self.desk.durable()
        return response

    async def OpenEpoch(self, request: pb.OpenEpochRequest, context: Context) -> pb.OpenEpochResponse:
        """Grant a new epoch and fence off its predecessors."""
        run = self.run(request.run_id)

        def execute(record: st.Record) -> pb.OpenEpochResponse:
            at = self.desk.moment()
            returned, fenced = run.open_epoch(optional_epoch(request), at)
            record.open_epoch = run.state.epoch
            self.desk.record(run, record, at)
            self.desk.fence(run, fenced)
            self.desk.changed(run, *run.partitions.values())
            return pb.OpenEpochResponse(epoch=run.state.epoch, returned_groups=returned)

        return await self.once(request.run_id, "OpenEpoch", request, request.request_id, execute)

    async def RenewEpoch(self, request: pb.RenewEpochRequest, context: Context) -> pb.RenewEpochResponse:
        """Extend every sample lease of the epoch."""
        run = self.run(request.run_id)
        run.check_epoch(request.epoch)
        self.desk.contact(run)
        return pb.RenewEpochResponse(renewed=len(run.state.leases.live) if run.state.epoch else 0)
