"""Calls on checkpoints."""

import secrets

from services.buffer.domain.run import check_step
from services.buffer.servicers.base import BufferCalls, Context, optional_epoch
from services.buffer.storage.checkpoints import Checkpoints
from services.buffer.storage.saving import restore, save, verify
from services.runtime.errors import require_id, unimplemented
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


class CheckpointCalls(BufferCalls):
    """Checkpoint, Restore, ListCheckpoints, VerifyCheckpoint, DeleteCheckpoint."""

    def _kept(self, call: str) -> Checkpoints:
        """Where checkpoints are. Raises UNIMPLEMENTED without a data directory."""
        if self.checkpoints is None:
            raise unimplemented(call)
        return self.checkpoints

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointResponse:
        """Save a run while traffic goes on."""
        kept = self._kept("Checkpoint")
        run = self.run(request.run_id)
        run.check_epoch(optional_epoch(request))
        check_step(request.step)
        checkpoint_id = request.checkpoint_id or f"{request.step}-{secrets.token_hex(8)}"
        require_id("checkpoint_id", checkpoint_id)
        self.desk.check_space()
        end = await save(self.desk, kept, run, request.step, checkpoint_id)
        self.desk.contact(run)
        return pb.CheckpointResponse(checkpoint=end.info, sampled_uncommitted=end.sampled_uncommitted)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        """Put a checkpoint in place of the run's content."""
        kept = self._kept("Restore")
        run = self.run(request.run_id)
        run.check_epoch(optional_epoch(request))
        checkpoint_id = require_id("checkpoint_id", request.checkpoint_id)
        self.desk.check_space()
        content = b""
        if request.request_id:
            require_id("request_id", request.request_id)
            content = self.content(request)

        async def execute() -> pb.RestoreResponse:
            record = st.Record(request_id=request.request_id, fingerprint=content)
            return await restore(self.desk, kept, run, checkpoint_id, record)

        answers = self.desk.memory.answers["Restore"]
        now = self.desk.clock.now()
        answer = await answers.once(run.run_id, "Restore", request.request_id, content, now, execute)
        await self.desk.durable()
        return answer

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        """List the complete checkpoints of a run."""
        kept = self._kept("ListCheckpoints")
        run = self.run(request.run_id)
        return pb.ListCheckpointsResponse(checkpoints=[end.info for end in await kept.list(run.run_id)])

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> pb.VerifyCheckpointResponse:
        """Read all of a checkpoint."""
        kept = self._kept("VerifyCheckpoint")
        run = self.run(request.run_id)
        end = await kept.require(run.run_id, require_id("checkpoint_id", request.checkpoint_id))
        await verify(kept, run.run_id, request.checkpoint_id)
        return pb.VerifyCheckpointResponse(checkpoint=end.info)

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        """Remove a checkpoint."""
        kept = self._kept("DeleteCheckpoint")
        run = self.run(request.run_id)
        checkpoint_id = require_id("checkpoint_id", request.checkpoint_id)
        # A restore reads it to its end first, and names what only this checkpoint holds.
        async with kept.lock(run.run_id):
            await kept.delete(run.run_id, checkpoint_id)
            self.desk.unhold(run.run_id, checkpoint_id)
        await self.desk.durable()
        return pb.DeleteCheckpointResponse()
