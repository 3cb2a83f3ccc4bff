"""Clients of the three services: asyncio and blocking.

    async with AsyncBufferClient("127.0.0.1:50051") as buffer:
        await buffer.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id="r1"))

`calls` offers every call of the contract with deadlines, retries of UNAVAILABLE, one request id across attempts and
typed errors. The methods beside it are waits, watches and transfers, which outlive restarts of the service.
"""

from turnout.channels import Security, SecurityError
from turnout.client._buffer import AsyncBufferClient, BufferClient, Sampled
from turnout.client._calls import duration, new_request_id, seconds
from turnout.client._engine import AsyncEngineClient, DeltaFn, EngineClient, Generation
from turnout.client._errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    OutOfOrder,
    OutOfRange,
    PartialFailure,
    PermissionDenied,
    ResourceExhausted,
    RunNotFound,
    StaleClaim,
    StaleEpoch,
    TurnoutError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    item_error,
)
from turnout.client._fork import Forked
from turnout.client._link import LinkClosed
from turnout.client._options import ClientOptions, Keepalive, RetryPolicy, Timeouts
from turnout.client._payloads import INLINE_BYTES
from turnout.client._refills import PaysRefills, RefillFn, Refills
from turnout.client._scheduler import AsyncSchedulerClient, SchedulerClient
from turnout.client._waits import ProgressFn

__all__ = [
    "INLINE_BYTES",
    "Aborted",
    "AlreadyExists",
    "AsyncBufferClient",
    "AsyncEngineClient",
    "AsyncSchedulerClient",
    "BufferClient",
    "Cancelled",
    "ClientOptions",
    "DataLoss",
    "DeadlineExceeded",
    "DeltaFn",
    "EngineClient",
    "FailedPrecondition",
    "Forked",
    "Generation",
    "InternalError",
    "InvalidArgument",
    "Keepalive",
    "LinkClosed",
    "NotFound",
    "OutOfOrder",
    "OutOfRange",
    "PartialFailure",
    "PaysRefills",
    "PermissionDenied",
    "ProgressFn",
    "RefillFn",
    "Refills",
    "ResourceExhausted",
    "RetryPolicy",
    "RunNotFound",
    "Sampled",
    "SchedulerClient",
    "Security",
    "SecurityError",
    "StaleClaim",
    "StaleEpoch",
    "Timeouts",
    "TurnoutError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "duration",
    "item_error",
    "new_request_id",
    "seconds",
]
