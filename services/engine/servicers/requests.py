"""Calls about requests, routes and progress."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import grpc.aio

from services.engine.progress import Report, RequestProgress
from services.engine.servicers.base import Calls
from services.engine.wire.enums import ROLES, ROUTES
from services.engine.wire.requests import read_generation, write_event, write_join_key
from services.runtime.errors import invalid_argument
from services.runtime.waits import duration_seconds
from turnout.engine.v1 import engine_pb2 as pb

Context = grpc.aio.ServicerContext

SHORTEST_INTERVAL_S: Final = 2.0
LONGEST_INTERVAL_S: Final = 10.0
"""The contract's limits, in domain seconds."""


class RequestCalls(Calls):
    """Generate, WatchRoutes and progress."""

    async def Generate(
        self, request: pb.GenerateRequest, context: Context[pb.GenerateRequest, pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        controller = self._read(request.run_id)
        generation = read_generation(request)
        async with aclosing(controller.generations.run(generation)) as events:
            async for event in events:
                yield write_event(event, generation)

    async def WatchRoutes(
        self, request: pb.WatchRoutesRequest, context: Context[pb.WatchRoutesRequest, pb.WatchRoutesResponse]
    ) -> AsyncIterator[pb.WatchRoutesResponse]:
        controller = self._read(request.run_id)
        fleet = controller.fleet
        while True:
            version = fleet.routes.version
            yield pb.WatchRoutesResponse(
                version=version,
                incarnation=controller.incarnation,
                routes=[
                    pb.Route(
                        replica_id=slot.replica_id,
                        state=ROUTES.write(slot.replica.route),
                        endpoint=slot.replica.spec.endpoint,
                        role=ROLES.write(slot.replica.spec.role),
                        load=fleet.placement.load(slot.replica_id),
                    )
                    for slot in fleet.all
                ],
            )
            await controller.draining.race(fleet.routes.beyond(version))

    async def WatchProgress(
        self, request: pb.WatchProgressRequest, context: Context[pb.WatchProgressRequest, pb.WatchProgressResponse]
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        controller = self._read(request.run_id)
        interval = LONGEST_INTERVAL_S
        if request.HasField("interval"):
            interval = duration_seconds(request.interval, "interval")
        if not SHORTEST_INTERVAL_S <= interval <= LONGEST_INTERVAL_S:
            raise invalid_argument("interval", "reports come every 2 to 10 seconds", value=f"{interval:g}")
        while True:
            yield pb.WatchProgressResponse(report=_write_report(await controller.progress.read()))
            await controller.draining.race(controller.clock.sleep(interval))

    async def GetProgress(
        self, request: pb.GetProgressRequest, context: Context[pb.GetProgressRequest, pb.GetProgressResponse]
    ) -> pb.GetProgressResponse:
        controller = self._read(request.run_id)
        return pb.GetProgressResponse(report=_write_report(await controller.progress.read()))


def _write_report(report: Report) -> pb.ProgressReport:
    return pb.ProgressReport(
        at=report.at,
        requests=[_write_request(request) for request in report.requests],
        replicas=[
            pb.ReplicaCounters(
                replica_id=replica_id,
                role=ROLES.write(counters.role),
                decoded_tokens=counters.engine.decoded_tokens,
                prefilled_tokens=counters.engine.prefilled_tokens,
                prefill_seconds=counters.engine.prefill_seconds,
                running=counters.engine.running,
                waiting=counters.engine.waiting,
                delivered_tokens=counters.delivered_tokens,
            )
            for replica_id, counters in report.counters.items()
        ],
        covered_share=report.covered_share,
    )


def _write_request(request: RequestProgress) -> pb.RequestProgress:
    return pb.RequestProgress(
        join_key=None if request.join_key is None else write_join_key(request.join_key),
        engine_request_id=request.engine_request_id,
        replica_id=request.replica_id,
        role=pb.REPLICA_ROLE_UNSPECIFIED if request.role is None else ROLES.write(request.role),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
    )
