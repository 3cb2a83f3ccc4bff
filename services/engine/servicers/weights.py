"""Calls of weight transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Final

import grpc.aio

from services.engine.domain.kept import UpdateKind
from services.engine.fleet import Fleet
from services.engine.servicers.base import Calls, optional_epoch, optional_timeout, succeeded
from services.engine.updating import Ack
from services.engine.wire.enums import KEEPS_IN_FLIGHT, UPDATE_KINDS
from services.engine.wire.operations import write_duration, write_operation
from services.engine.wire.replicas import read_gpu, write_gpu
from services.runtime.errors import invalid_argument, require_non_negative
from services.runtime.waits import duration_seconds, wait_budget
from turnout.engine.v1 import engine_pb2 as pb

Context = grpc.aio.ServicerContext

MAX_CHUNK_BYTES: Final = 4 << 20
"""The contract's limit; a chunk is copied once per replica."""

RENDEZVOUS_WAIT_S: Final = 30.0
"""The contract's default."""


class WeightCalls(Calls):
    """BeginWeightUpdate to ReportVacated."""

    async def BeginWeightUpdate(
        self,
        request: pb.BeginWeightUpdateRequest,
        context: Context[pb.BeginWeightUpdateRequest, pb.BeginWeightUpdateResponse],
    ) -> pb.BeginWeightUpdateResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        kind = UPDATE_KINDS.read("kind", request.kind, default=UpdateKind.AWAKE)
        keep = KEEPS_IN_FLIGHT.read("in_flight", request.in_flight, default=False)
        timeout = self._timeout(optional_timeout(request))

        async def execute() -> pb.BeginWeightUpdateResponse:
            update, operation = await controller.updating.begin(
                self._select(request.selector),
                kind,
                request.weight_version,
                adapter=request.adapter,
                keep_requests=keep,
                staggered=request.staggered,
                allow_older=request.allow_older,
                timeout=timeout,
            )
            controller.updating.answered(update)
            return pb.BeginWeightUpdateResponse(
                update_id=update.update_id,
                wave=_layouts(controller.fleet, update.wave),
                remaining=update.remaining,
                operation=write_operation(operation),
                wave_index=update.wave_index,
            )

        return await self._once(request, request.request_id, execute)

    async def UpdateWeights(
        self,
        request_iterator: AsyncIterator[pb.UpdateWeightsRequest],
        context: Context[pb.UpdateWeightsRequest, pb.UpdateWeightsResponse],
    ) -> pb.UpdateWeightsResponse:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("frame") != "header":
            raise invalid_argument("header", "the first frame of UpdateWeights is its header", reason="BAD_FRAME")
        header = first.header
        controller = self._command(header.run_id, optional_epoch(header))
        operation = await controller.updating.feed(
            header.update_id,
            header.wave_index,
            header.replica_ids,
            header.size,
            header.info_json,
            header.move_index,
            _frames(request_iterator),
            controller.timeout(None),
        )
        if len(operation.failures) == len(operation.outcomes):
            succeeded(operation)
        return pb.UpdateWeightsResponse(operation=write_operation(operation))

    async def CommitWeightUpdate(
        self,
        request: pb.CommitWeightUpdateRequest,
        context: Context[pb.CommitWeightUpdateRequest, pb.CommitWeightUpdateResponse],
    ) -> pb.CommitWeightUpdateResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        acks = {ack.replica_id: Ack(ack.ok, ack.checksum) for ack in request.acks}
        timeout = self._timeout(optional_timeout(request))

        async def execute() -> pb.CommitWeightUpdateResponse:
            update, operation = await controller.updating.commit(request.update_id, request.wave_index, acks, timeout)
            return pb.CommitWeightUpdateResponse(
                operation=write_operation(succeeded(operation)),
                complete=update.complete,
                wave=_layouts(controller.fleet, update.wave),
                remaining=update.remaining,
                blackout=write_duration(controller.updating.blackout(update)),
                tokens_recomputed=update.tokens_recomputed,
                next_wave_index=0 if update.complete else update.wave_index,
            )

        # A wave is committed once: its number makes the call repeatable.
        wave = f"{request.update_id} {request.wave_index}"
        return await self._repeatable("CommitWeightUpdate", wave, b"", execute)

    async def AbortWeightUpdate(
        self,
        request: pb.AbortWeightUpdateRequest,
        context: Context[pb.AbortWeightUpdateRequest, pb.AbortWeightUpdateResponse],
    ) -> pb.AbortWeightUpdateResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        operation, half_updated = await controller.updating.abort(request.update_id, controller.timeout(None))
        return pb.AbortWeightUpdateResponse(operation=write_operation(succeeded(operation)), half_updated=half_updated)

    async def ExchangeRendezvous(
        self,
        request: pb.ExchangeRendezvousRequest,
        context: Context[pb.ExchangeRendezvousRequest, pb.ExchangeRendezvousResponse],
    ) -> pb.ExchangeRendezvousResponse:
        controller = self._read(request.run_id)
        asked = duration_seconds(request.max_wait, "max_wait") if request.HasField("max_wait") else RENDEZVOUS_WAIT_S
        meeting = controller.updating.meetings.exchange(
            request.update_id,
            request.name,
            request.participant,
            list(request.participants),
            request.blob,
            wait_budget(asked, context.time_remaining()),
        )
        return pb.ExchangeRendezvousResponse(blobs=await controller.draining.race(meeting))

    async def ReportVacated(
        self, request: pb.ReportVacatedRequest, context: Context[pb.ReportVacatedRequest, pb.ReportVacatedResponse]
    ) -> pb.ReportVacatedResponse:
        controller = self._command(request.run_id, optional_epoch(request))
        for vacated in request.vacated:
            require_non_negative("vacated.bytes_free", vacated.bytes_free)
        missing = controller.updating.vacated(request.update_id, [read_gpu(vacated.gpu) for vacated in request.vacated])
        await controller.book.durable()
        return pb.ReportVacatedResponse(missing=[write_gpu(gpu) for gpu in missing])


def _layouts(fleet: Fleet, replica_ids: Iterable[str]) -> list[pb.ReplicaLayout]:
    wanted = set(replica_ids)
    return [
        pb.ReplicaLayout(
            replica_id=slot.replica_id,
            ranks=[pb.RankLayout(rank=rank, gpu=write_gpu(gpu)) for rank, gpu in enumerate(slot.replica.spec.gpus)],
            weight_version=slot.replica.held_version,
        )
        for slot in fleet.all
        if slot.replica_id in wanted
    ]


async def _frames(requests: AsyncIterator[pb.UpdateWeightsRequest]) -> AsyncIterator[bytes | int]:
    async for request in requests:
        match request.WhichOneof("frame"):
            case "chunk":
                if len(request.chunk) > MAX_CHUNK_BYTES:
                    raise invalid_argument(
                        "chunk", f"a chunk has at most {MAX_CHUNK_BYTES} bytes", value=len(request.chunk)
                    )
                yield request.chunk
            case "end":
                yield request.end.crc32c
                return
            case _:
                raise invalid_argument("frame", "after the header come chunks and one end", reason="BAD_FRAME")
