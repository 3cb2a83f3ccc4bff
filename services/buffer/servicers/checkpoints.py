"""Calls on checkpoints: this service keeps everything in memory and offers none."""

from services.buffer.servicers.base import BufferCalls, Context
from services.runtime.errors import unimplemented
from turnout.buffer.v1 import buffer_pb2 as pb


class CheckpointCalls(BufferCalls):
    """Checkpoint, Restore, ListCheckpoints, VerifyCheckpoint, DeleteCheckpoint."""

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointResponse:
        """Not offered."""
        raise unimplemented("Checkpoint")

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        """Not offered."""
        raise unimplemented("Restore")

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        """Not offered."""
        raise unimplemented("ListCheckpoints")

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> pb.VerifyCheckpointResponse:
        """Not offered."""
        raise unimplemented("VerifyCheckpoint")

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        """Not offered."""
        raise unimplemented("DeleteCheckpoint")
