"""Calls on memory, scheduling and caches, and operations."""

from __future__ import annotations

import grpc.aio

from services.engine.domain.spec import PauseMode
from services.engine.servicers.base import Calls, optional_epoch, optional_timeout, succeeded
from services.engine.wire.enums import CACHES, PAUSE_MODES, read_level
from services.engine.wire.operations import write_operation
from services.runtime.errors import invalid_argument
from turnout.engine.v1 import engine_pb2 as pb

Context = grpc.aio.ServicerContext


class CommandCalls(Calls):
    """The single calls."""

    async def Sleep(
        self, request: pb.SleepRequest, context: Context[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        mode = PAUSE_MODES.read("mode", request.mode, default=PauseMode.ABORT)
        operation = await controller.commands.sleep(
            self._select(request.selector), read_level(request.level), mode, self._timeout(optional_timeout(request))
        )
        return pb.SleepResponse(operation=write_operation(succeeded(operation)))

    async def WakeUp(
        self, request: pb.WakeUpRequest, context: Context[pb.WakeUpRequest, pb.WakeUpResponse]
    ) -> pb.WakeUpResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        tags = frozenset(request.tags.tags) if request.HasField("tags") else None
        if tags is not None and not tags:
            raise invalid_argument("tags", "name at least one tag, or leave tags out for all", reason="EMPTY_TAGS")
        operation = await controller.commands.wake_up(
            self._select(request.selector), tags, self._timeout(optional_timeout(request))
        )
        return pb.WakeUpResponse(operation=write_operation(succeeded(operation)))

    async def ReleaseKvCache(
        self,
        request: pb.ReleaseKvCacheRequest,
        context: Context[pb.ReleaseKvCacheRequest, pb.ReleaseKvCacheResponse],
    ) -> pb.ReleaseKvCacheResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        slots, timeout = self._select(request.selector), self._timeout(optional_timeout(request))
        operation = await controller.commands.release_kv_cache(slots, timeout)
        return pb.ReleaseKvCacheResponse(operation=write_operation(succeeded(operation)))

    async def ResumeKvCache(
        self, request: pb.ResumeKvCacheRequest, context: Context[pb.ResumeKvCacheRequest, pb.ResumeKvCacheResponse]
    ) -> pb.ResumeKvCacheResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        slots, timeout = self._select(request.selector), self._timeout(optional_timeout(request))
        operation = await controller.commands.resume_kv_cache(slots, timeout)
        return pb.ResumeKvCacheResponse(operation=write_operation(succeeded(operation)))

    async def Pause(
        self, request: pb.PauseRequest, context: Context[pb.PauseRequest, pb.PauseResponse]
    ) -> pb.PauseResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        mode = PAUSE_MODES.read("mode", request.mode, default=PauseMode.ABORT)
        clear_cache = request.clear_cache if request.HasField("clear_cache") else True
        operation = await controller.commands.pause(
            self._select(request.selector), mode, clear_cache, self._timeout(optional_timeout(request))
        )
        return pb.PauseResponse(operation=write_operation(succeeded(operation)))

    async def Resume(
        self, request: pb.ResumeRequest, context: Context[pb.ResumeRequest, pb.ResumeResponse]
    ) -> pb.ResumeResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        slots, timeout = self._select(request.selector), self._timeout(optional_timeout(request))
        operation = await controller.commands.resume(slots, timeout)
        return pb.ResumeResponse(operation=write_operation(succeeded(operation)))

    async def ResetCaches(
        self, request: pb.ResetCachesRequest, context: Context[pb.ResetCachesRequest, pb.ResetCachesResponse]
    ) -> pb.ResetCachesResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation = await controller.commands.reset_caches(
            self._select(request.selector),
            frozenset(CACHES.read("caches", cache) for cache in request.caches),
            request.reset_running_requests,
            request.reset_connectors,
            self._timeout(optional_timeout(request)),
        )
        return pb.ResetCachesResponse(operation=write_operation(succeeded(operation)))

    async def Abort(
        self, request: pb.AbortRequest, context: Context[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        controller = self._read(request.run_id)
        selected = self._select(request.selector)
        everywhere = not (request.selector.replica_ids or request.selector.roles)
        aborted = await controller.generations.abort(
            None if request.all_requests else request.request_ids, None if everywhere else selected
        )
        return pb.AbortResponse(aborted=aborted)

    async def CollectiveRpc(
        self, request: pb.CollectiveRpcRequest, context: Context[pb.CollectiveRpcRequest, pb.CollectiveRpcResponse]
    ) -> pb.CollectiveRpcResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation = await controller.commands.collective_rpc(
            self._select(request.selector),
            request.method,
            request.arguments_json,
            request.shard if request.HasField("shard") else None,
            self._timeout(optional_timeout(request)),
        )
        return pb.CollectiveRpcResponse(operation=write_operation(succeeded(operation)))

    async def GetOperation(
        self, request: pb.GetOperationRequest, context: Context[pb.GetOperationRequest, pb.GetOperationResponse]
    ) -> pb.GetOperationResponse:
        operation = self._read(request.run_id).operations.get(request.operation_id)
        return pb.GetOperationResponse(operation=write_operation(operation))

    async def ListOperations(
        self, request: pb.ListOperationsRequest, context: Context[pb.ListOperationsRequest, pb.ListOperationsResponse]
    ) -> pb.ListOperationsResponse:
        size = request.page_size if request.HasField("page_size") else 100
        page, following = self._read(request.run_id).operations.page(size, request.page_token)
        return pb.ListOperationsResponse(
            operations=[write_operation(operation) for operation in page], next_page_token=following
        )
