"""A trainer moves weights into the hybrids of a lend."""

from __future__ import annotations

from typing import Any

import google_crc32c
import grpc.aio

from services.runtime.errors import Code
from services.runtime.statuses import from_rpc_error
from tests.loop.house import REPLICA_S
from tests.loop.jobs import Job
from tests.scheduler.world import wall
from turnout.engine.v1 import engine_pb2 as epb
from turnout.engine.v1 import engine_pb2_grpc
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

WEIGHTS = b"w" * 256


async def install(stub: engine_pb2_grpc.EngineControllerAsyncStub, job: Job, lend: pb.Lend) -> None:
    """Move weights into the hybrids that wait for them. Raises TurnoutError."""
    who = job.who
    hybrids = epb.ReplicaSelector(roles=[epb.REPLICA_ROLE_HYBRID])

    async def frames(update_id: str) -> Any:
        header = epb.UpdateWeightsHeader(update_id=update_id, size=len(WEIGHTS), **who)
        yield epb.UpdateWeightsRequest(header=header)
        yield epb.UpdateWeightsRequest(chunk=WEIGHTS)
        yield epb.UpdateWeightsRequest(end=epb.UpdateWeightsEnd(crc32c=google_crc32c.value(WEIGHTS)))

    try:
        if lend.kind == events_pb2.LEND_KIND_INIT:
            # Hybrids that registered after the run was opened join its first lend.
            begin = epb.BeginLendRequest(lend_id=lend.lend_id, timeout=wall(REPLICA_S), **who)
            await stub.BeginLend(begin)
        if job.update_id:
            await _abort(stub, job)
        begun = await stub.BeginWeightUpdate(
            epb.BeginWeightUpdateRequest(
                selector=hybrids,
                weight_version=lend.weight_version,
                kind=epb.UPDATE_KIND_ASLEEP,
                allow_older=True,
                timeout=wall(REPLICA_S),
                request_id=f"{lend.lend_id}/{job.updates}",
                **who,
            )
        )
        job.update_id = begun.update_id
        await stub.UpdateWeights(frames(begun.update_id))
        await stub.CommitWeightUpdate(
            epb.CommitWeightUpdateRequest(
                update_id=begun.update_id,
                acks=[epb.UpdateAck(replica_id=layout.replica_id, ok=True) for layout in begun.wave],
                **who,
            )
        )
        vacated = [epb.Vacated(gpu=rank.gpu, bytes_free=1) for layout in begun.wave for rank in layout.ranks]
        await stub.ReportVacated(epb.ReportVacatedRequest(update_id=begun.update_id, vacated=vacated, **who))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    job.update_id, job.updates = "", job.updates + 1


async def _abort(stub: engine_pb2_grpc.EngineControllerAsyncStub, job: Job) -> None:
    """Give up an update that was cut, so that another one can begin."""
    request = epb.AbortWeightUpdateRequest(run_id=job.run_id, epoch=job.epoch, update_id=job.update_id)
    try:
        await stub.AbortWeightUpdate(request)
    except grpc.aio.AioRpcError as error:
        if from_rpc_error(error).code is Code.UNAVAILABLE:
            raise
    job.update_id, job.updates = "", job.updates + 1
