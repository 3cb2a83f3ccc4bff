"""Calls that lend hybrid replicas and take them back."""

from __future__ import annotations

import grpc.aio

from services.engine.domain.spec import Role
from services.engine.servicers.base import Calls, optional_epoch, optional_timeout, succeeded
from services.engine.wire.operations import write_operation
from services.engine.wire.requests import read_join_key
from turnout.engine.v1 import engine_pb2 as pb

Context = grpc.aio.ServicerContext


class LendingCalls(Calls):
    """BeginLend to Reclaim."""

    async def BeginLend(
        self, request: pb.BeginLendRequest, context: Context[pb.BeginLendRequest, pb.BeginLendResponse]
    ) -> pb.BeginLendResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation, members = await controller.lending.begin(
            request.lend_id,
            request.replica_ids,
            request.keep_sessions,
            self._timeout(optional_timeout(request)),
            {
                Role.HYBRID: list(map(read_join_key, request.placement.hybrid)),
                Role.STANDALONE: list(map(read_join_key, request.placement.standalone)),
            },
        )
        return pb.BeginLendResponse(operation=write_operation(succeeded(operation)), replica_ids=members)

    async def FinishLend(
        self, request: pb.FinishLendRequest, context: Context[pb.FinishLendRequest, pb.FinishLendResponse]
    ) -> pb.FinishLendResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation = await controller.lending.finish(
            request.lend_id, request.weight_version, self._timeout(optional_timeout(request))
        )
        await controller.generations.move()
        return pb.FinishLendResponse(operation=write_operation(succeeded(operation)))

    async def AbortLend(
        self, request: pb.AbortLendRequest, context: Context[pb.AbortLendRequest, pb.AbortLendResponse]
    ) -> pb.AbortLendResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation = await controller.lending.abort(request.lend_id, self._timeout(optional_timeout(request)))
        return pb.AbortLendResponse(operation=write_operation(succeeded(operation)))

    async def Reclaim(
        self, request: pb.ReclaimRequest, context: Context[pb.ReclaimRequest, pb.ReclaimResponse]
    ) -> pb.ReclaimResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation, interrupted = await controller.lending.reclaim(
            request.replica_ids, self._timeout(optional_timeout(request))
        )
        return pb.ReclaimResponse(
            operation=write_operation(succeeded(operation)),
            incarnation=controller.incarnation,
            interrupted=interrupted,
        )
