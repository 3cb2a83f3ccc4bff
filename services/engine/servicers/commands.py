"""Calls on memory, scheduling and caches, and operations."""

from __future__ import annotations

import grpc.aio

from services.engine.domain.spec import PauseMode
from services.engine.servicers.base import Calls, optional_epoch
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
        commands = self._command(request.run_id, optional_epoch(request)).commands
        level = read_level(request.level)
        mode = PAUSE_MODES.read("mode", request.mode, default=PauseMode.ABORT)
        slots = self._select(request.selector)
        operation = await self._operate(request, slots, lambda target: commands.sleep(target, level, mode))
        return pb.SleepResponse(operation=operation)

    async def WakeUp(
        self, request: pb.WakeUpRequest, context: Context[pb.WakeUpRequest, pb.WakeUpResponse]
    ) -> pb.WakeUpResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        tags = frozenset(request.tags.tags) if request.HasField("tags") else None
        if tags is not None and not tags:
            raise invalid_argument("tags", "name at least one tag, or leave tags out for all", reason="EMPTY_TAGS")
        slots = self._select(request.selector)
        operation = await self._operate(request, slots, lambda target: commands.wake_up(target, tags))
        return pb.WakeUpResponse(operation=operation)

    async def ReleaseKvCache(
        self,
        request: pb.ReleaseKvCacheRequest,
        context: Context[pb.ReleaseKvCacheRequest, pb.ReleaseKvCacheResponse],
    ) -> pb.ReleaseKvCacheResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        operation = await self._operate(request, self._select(request.selector), commands.release_kv_cache)
        return pb.ReleaseKvCacheResponse(operation=operation)

    async def ResumeKvCache(
        self, request: pb.ResumeKvCacheRequest, context: Context[pb.ResumeKvCacheRequest, pb.ResumeKvCacheResponse]
    ) -> pb.ResumeKvCacheResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        operation = await self._operate(request, self._select(request.selector), commands.resume_kv_cache)
        return pb.ResumeKvCacheResponse(operation=operation)

    async def Pause(
        self, request: pb.PauseRequest, context: Context[pb.PauseRequest, pb.PauseResponse]
    ) -> pb.PauseResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        mode = PAUSE_MODES.read("mode", request.mode, default=PauseMode.ABORT)
        clear_cache = request.clear_cache if request.HasField("clear_cache") else True
        slots = self._select(request.selector)
        operation = await self._operate(request, slots, lambda target: commands.pause(target, mode, clear_cache))
        return pb.PauseResponse(operation=operation)

    async def Resume(
        self, request: pb.ResumeRequest, context: Context[pb.ResumeRequest, pb.ResumeResponse]
    ) -> pb.ResumeResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        operation = await self._operate(request, self._select(request.selector), commands.resume)
        return pb.ResumeResponse(operation=operation)

    async def ResetCaches(
        self, request: pb.ResetCachesRequest, context: Context[pb.ResetCachesRequest, pb.ResetCachesResponse]
    ) -> pb.ResetCachesResponse:
        commands = self._command(request.run_id, optional_epoch(request)).commands
        caches = frozenset(CACHES.read("caches", cache) for cache in request.caches)
        operation = await self._operate(
            request,
            self._select(request.selector),
            lambda target: commands.reset_caches(
                target, caches, request.reset_running_requests, request.reset_connectors
            ),
        )
        return pb.ResetCachesResponse(operation=operation)

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
        commands = self._command(request.run_id, optional_epoch(request)).commands
        shard = request.shard if request.HasField("shard") else None
        operation = await self._operate(
            request,
            self._select(request.selector),
            lambda target: commands.collective_rpc(target, request.method, request.arguments_json, shard),
        )
        return pb.CollectiveRpcResponse(operation=operation)

    async def GetOperation(
        self, request: pb.GetOperationRequest, context: Context[pb.GetOperationRequest, pb.GetOperationResponse]
    ) -> pb.GetOperationResponse:
        controller = self._read(request.run_id)
        operation = controller.operations.get(request.operation_id)
        await controller.book.durable()
        return pb.GetOperationResponse(operation=write_operation(operation))

    async def ListOperations(
        self, request: pb.ListOperationsRequest, context: Context[pb.ListOperationsRequest, pb.ListOperationsResponse]
    ) -> pb.ListOperationsResponse:
        size = request.page_size if request.HasField("page_size") else 100
        page, following = self._read(request.run_id).operations.page(size, request.page_token)
        return pb.ListOperationsResponse(
            operations=[write_operation(operation) for operation in page], next_page_token=following
        )
