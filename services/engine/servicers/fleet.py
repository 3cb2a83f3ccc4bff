"""Calls about the run and its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from services.engine.servicers.base import Calls
from services.engine.slot import Slot
from services.engine.wire.replicas import read_spec, write_replica
from turnout.engine.v1 import engine_pb2 as pb

Context = grpc.aio.ServicerContext


class FleetCalls(Calls):
    """OpenEpoch, registration and reading of replicas."""

    async def OpenEpoch(
        self, request: pb.OpenEpochRequest, context: Context[pb.OpenEpochRequest, pb.OpenEpochResponse]
    ) -> pb.OpenEpochResponse:
        controller = self._controller
        controller.fence.check_binding(request.run_id)

        async def execute() -> pb.OpenEpochResponse:
            epoch = await controller.open_epoch(request.run_id, request.epoch if request.HasField("epoch") else None)
            return pb.OpenEpochResponse(
                epoch=epoch, incarnation=controller.incarnation, time_scale=controller.clock.scale
            )

        return await self._once(request, request.request_id, execute)

    async def Register(
        self, request: pb.RegisterRequest, context: Context[pb.RegisterRequest, pb.RegisterResponse]
    ) -> pb.RegisterResponse:
        controller = self._controller
        controller.fence.check_binding(request.run_id)
        if request.HasField("epoch"):
            controller.fence.check_epoch(request.epoch)
        spec = read_spec(request.spec)

        async def execute() -> pb.RegisterResponse:
            slot = await controller.register(request.run_id, spec)
            return pb.RegisterResponse(replica=self._write(slot))

        return await self._once(request, request.request_id, execute)

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Context[pb.DeregisterRequest, pb.DeregisterResponse]
    ) -> pb.DeregisterResponse:
        controller = self._read(request.run_id)
        if request.HasField("epoch"):
            controller.fence.check_epoch(request.epoch)

        async def execute() -> pb.DeregisterResponse:
            await controller.deregister(request.replica_id)
            return pb.DeregisterResponse()

        return await self._once(request, request.request_id, execute)

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Context[pb.ListReplicasRequest, pb.ListReplicasResponse]
    ) -> pb.ListReplicasResponse:
        controller = self._read(request.run_id)
        slots = self._select(request.selector)
        if request.probe:
            await asyncio.gather(*(slot.confirm_free() for slot in slots if slot.replica.confirmed_free))
        await controller.book.durable()
        return pb.ListReplicasResponse(
            replicas=[self._write(slot) for slot in self._select(request.selector)],
            incarnation=controller.incarnation,
            epoch=controller.fence.epoch,
        )

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: Context[pb.WatchReplicasRequest, pb.WatchReplicasResponse]
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        controller = self._read(request.run_id)
        self._select(request.selector)
        wanted = set(request.selector.replica_ids)
        roles = pb.ReplicaSelector(roles=request.selector.roles)
        seen: dict[str, tuple[Slot, int]] = {}
        told: dict[str, bytes] = {}
        first = True
        while True:
            version = controller.fleet.replicas.version
            slots = [slot for slot in self._select(roles) if not wanted or slot.replica_id in wanted]
            removed = sorted(told.keys() - {slot.replica_id for slot in slots})
            for replica_id in removed:
                del seen[replica_id], told[replica_id]
            changed: list[pb.Replica] = []
            for slot in slots:
                # Each step of each replica of a fan-out wakes every watcher, and most replicas are as they were.
                if seen.get(slot.replica_id) == (slot, slot.revision):
                    continue
                seen[slot.replica_id] = (slot, slot.revision)
                now = self._without_counts(slot)
                if told.get(slot.replica_id) != now:
                    told[slot.replica_id] = now
                    changed.append(self._write(slot))
            if first or changed or removed:
                yield pb.WatchReplicasResponse(changed=changed, removed=removed, incarnation=controller.incarnation)
            first = False
            await controller.draining.race(controller.fleet.replicas.beyond(version))

    @staticmethod
    def _without_counts(slot: Slot) -> bytes:
        # Counts change with every request; they alone are no change worth a message.
        return write_replica(slot, 0, 0).SerializeToString(deterministic=True)
