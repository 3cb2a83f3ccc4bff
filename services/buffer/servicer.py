"""The servicer of the replay buffer, put together from its parts."""

from services.buffer.servicers.checkpoints import CheckpointCalls
from services.buffer.servicers.payloads import PayloadCalls
from services.buffer.servicers.reading import ReadingCalls
from services.buffer.servicers.releases import ReleaseCalls
from services.buffer.servicers.results import ResultCalls
from services.buffer.servicers.runs import RunCalls
from services.buffer.servicers.waits import WaitCalls
from services.buffer.servicers.work import WorkCalls
from turnout.buffer.v1 import buffer_pb2_grpc


class ReplayBufferServicer(
    RunCalls,
    WorkCalls,
    ResultCalls,
    WaitCalls,
    ReadingCalls,
    PayloadCalls,
    ReleaseCalls,
    CheckpointCalls,
    buffer_pb2_grpc.ReplayBufferServicer,
):
    """Every call of `turnout.buffer.v1.ReplayBuffer`."""
