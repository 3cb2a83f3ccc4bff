"""The servicer of the engine controller, put together from its parts."""

from services.engine.servicers.commands import CommandCalls
from services.engine.servicers.fleet import FleetCalls
from services.engine.servicers.lending import LendingCalls
from services.engine.servicers.requests import RequestCalls
from services.engine.servicers.weights import WeightCalls
from turnout.engine.v1 import engine_pb2_grpc


class EngineControllerServicer(
    FleetCalls,
    CommandCalls,
    LendingCalls,
    WeightCalls,
    RequestCalls,
    engine_pb2_grpc.EngineControllerServicer,
):
    """Every call of `turnout.engine.v1.EngineController`."""
