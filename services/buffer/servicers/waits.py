"""Calls that wait for depth, and the leases that Sample gives."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, cast

from services.buffer.domain.depth import Depth
from services.buffer.domain.partition import Partition
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.run import Run, WaitSpec
from services.buffer.domain.waits import WaitEnd
from services.buffer.parking import ParkedWait
from services.buffer.servicers.base import BufferCalls, Context, optional_epoch, required_step
from services.buffer.wire.frames import groups_frame
from services.buffer.wire.scalars import int64
from services.buffer.wire.waits import (
    progress_to,
    refill_due_to,
    sample_done_to,
    sampled_to,
    wait_done_to,
)
from services.runtime.errors import invalid_argument, require_id, resource_exhausted
from services.runtime.waits import deadline_after, duration_of, duration_seconds, park, wait_budget
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

# Domain seconds between signs of life of a wait, and the least a caller may ask for.
PROGRESS_INTERVAL_S = 10.0
MIN_PROGRESS_INTERVAL_S = 0.1
# A part of a manifest: large enough for throughput, far below the 4 MiB that many clients accept.
PART_BYTES = 1 << 20
# Groups of a manifest that are written in one turn of the event loop, for which all other calls wait: some 5 ms.
GROUPS_PER_TURN = 256

WaitEvent = Depth | RefillClaim | WaitEnd


class WaitCalls(BufferCalls):
    """WaitForSampleable, Sample, CommitSample, ReleaseSample, RenewSample, ReleasePayload."""

    # The final event told last by WaitForSampleable, and its message.
    _told: WaitEnd | None = None
    _done_message = pb.WaitForSampleableResponse()

    async def WaitForSampleable(
        self, request: pb.WaitForSampleableRequest, context: Context
    ) -> AsyncIterator[pb.WaitForSampleableResponse]:
        """Wait until enough groups are sampleable."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        epoch = optional_epoch(request)
        # Without an epoch the wait only watches, unless nobody ever opened one.
        trainer = epoch is not None or not run.state.epoch
        if trainer:
            run.check_epoch(epoch)
        spec = WaitSpec(required_step(request), request.target, request.cursor)
        async with aclosing(self._wait(run, partition, spec, request, context, trainer=trainer)) as events:
            async for event in events:
                match event:
                    case Depth():
                        yield pb.WaitForSampleableResponse(progress=progress_to(event, spec.target))
                    case RefillClaim():
                        yield pb.WaitForSampleableResponse(refill_due=refill_due_to(event))
                    case WaitEnd():
                        yield self._done(event)

    def _done(self, end: WaitEnd) -> pb.WaitForSampleableResponse:
        """The final message, which is the same for all that one change woke."""
        if end is not self._told:
            self._told, self._done_message = end, pb.WaitForSampleableResponse(done=wait_done_to(end))
        return self._done_message

    async def Sample(self, request: pb.SampleRequest, context: Context) -> AsyncIterator[pb.SampleResponse]:
        """Wait for a batch, then lease it."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        run.check_epoch(optional_epoch(request))
        if request.request_id:
            require_id("request_id", request.request_id)
        spec = WaitSpec(
            required_step(request),
            request.batch,
            request.cursor,
            sample=True,
            auto_commit=request.auto_commit,
            request_id=request.request_id,
            fingerprint=self.content(request),
        )
        async with aclosing(self._wait(run, partition, spec, request, context, trainer=True)) as events:
            async for event in events:
                match event:
                    case Depth():
                        yield pb.SampleResponse(progress=progress_to(event, spec.target))
                    case RefillClaim():
                        yield pb.SampleResponse(refill_due=refill_due_to(event))
                    case WaitEnd():
                        for part in await self._parts(run, event):
                            # The results are encoded already; bytes are sent as they are.
                            yield cast(pb.SampleResponse, groups_frame(part))
                        if event.lease is not None and spec.auto_commit:
                            self._commit(run, event.lease.lease_id)
                            self.desk.changed(run, partition)
                            await self.desk.durable()
                        left = 0.0 if event.lease is None else run.lease_left(event.lease, self.desk.clock.now())
                        done = sample_done_to(event, training=partition.training, lease=self.wall(left))
                        yield pb.SampleResponse(done=done)

    async def _parts(self, run: Run, end: WaitEnd) -> list[list[bytes]]:
        """The encoded batch in parts of about 1 MiB. A group that cannot be sent at all sends the batch back."""
        parts: list[list[bytes]] = []
        size = PART_BYTES
        for number, group in enumerate(end.lease.groups if end.lease is not None else ()):
            if number and not number % GROUPS_PER_TURN:
                await asyncio.sleep(0)
            encoded = sampled_to(group)
            length = len(encoded)
            if end.lease is not None and length + 1024 > self.max_message_bytes:
                self._release(run, end.lease.lease_id)
                self.desk.changed(run, run.partition(end.lease.partition))
                raise resource_exhausted(
                    "MANIFEST_TOO_LARGE",
                    f"the manifest of one group has {length} bytes, more than fits into a message",
                    field="group_id",
                    value=group.group_id,
                    limit=self.max_message_bytes,
                )
            if size + length > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(encoded)
            size += length
        return parts

    async def _wait(
        self, run: Run, partition: Partition, spec: WaitSpec, request: Any, context: Context, *, trainer: bool
    ) -> AsyncGenerator[WaitEvent, None]:
        """The events of a wait: depths and refill claims, then the end."""
        clock = self.desk.clock
        interval = _progress_interval(request)
        asked = duration_seconds(request.max_wait, "max_wait") if request.HasField("max_wait") else None
        deadline = deadline_after(clock, wait_budget(asked, context.time_remaining()))
        self.draining.check()
        parking = self.desk.parking(run)
        # A look that is answered at once is not parked, and so not refused for those who are.
        with parking.slot() if deadline > clock.now() else nullcontext():
            sealed = partition.evictions.sealed
            wait, answered = run.open_wait(partition, spec, self.desk.moment(), trainer=trainer)
            self.desk.sealed(run, partition, before=sealed)
            depth = partition.depth(spec.step, clock.now())
            parked = self.desk.park(run, partition, wait)
            parked.ended = answered
            delivered = False
            try:
                if trainer:
                    self.desk.contact(run, spec.step)
                self.desk.changed(run, partition)
                await self.desk.durable()
                yield depth
                told_at = clock.now()
                while True:
                    while parked.refills:
                        await parked.durable()
                        yield parked.refills.popleft()
                    parked.check()
                    if parked.ended is None and clock.now() >= deadline:
                        parked.ended = self.desk.time_out(run, partition, wait)
                        parked.decided = self.desk.promise()
                    if parked.ended is not None:
                        await parked.durable()
                        break
                    if parked.progress_due or clock.now() >= told_at + interval:
                        parked.progress_due = False
                        told_at = clock.now()
                        reading = partition.depth(spec.step, told_at)
                        await self.desk.durable()
                        yield reading
                        continue
                    parked.wake.clear()
                    await park(parked.wake, min(deadline, told_at + interval), clock=clock, draining=self.draining)
                yield parked.ended
                delivered = True
            finally:
                returned = not delivered and self._give_back(run, parked)
                self.desk.leave(run, partition, parked, changed=returned)

    def _give_back(self, run: Run, parked: ParkedWait) -> bool:
        """A batch that nobody can ever have heard of goes back; with a request_id a repeat still finds it.

        Returns whether there was one.
        """
        lease = parked.ended.lease if parked.ended is not None else None
        if lease is None or parked.wait.request_id or lease.lease_id not in run.state.leases.live:
            return False
        if self.desk.runs.get(run.run_id) is not run:
            return False
        self._release(run, lease.lease_id)
        return True

    def _commit(self, run: Run, lease_id: str) -> Sequence[str]:
        live = lease_id in run.state.leases.live
        at = self.desk.moment()
        group_ids = run.commit(lease_id, at)
        if live:
            self.desk.record(run, st.Record(commit=lease_id), at)
        return group_ids

    def _release(self, run: Run, lease_id: str) -> Sequence[str]:
        live = lease_id in run.state.leases.live
        at = self.desk.moment()
        group_ids = run.release(lease_id, at)
        if live:
            self.desk.record(run, st.Record(release=lease_id), at)
        return group_ids

    async def CommitSample(self, request: pb.CommitSampleRequest, context: Context) -> pb.CommitSampleResponse:
        """The leased groups are consumed."""
        run, lease_id = self._leased(request)
        group_ids = self._commit(run, lease_id)
        self._ended(run, lease_id)
        await self.desk.durable()
        return pb.CommitSampleResponse(group_ids=group_ids)

    async def ReleaseSample(self, request: pb.ReleaseSampleRequest, context: Context) -> pb.ReleaseSampleResponse:
        """The leased groups come back."""
        run, lease_id = self._leased(request)
        group_ids = self._release(run, lease_id)
        self._ended(run, lease_id)
        await self.desk.durable()
        return pb.ReleaseSampleResponse(group_ids=group_ids)

    async def RenewSample(self, request: pb.RenewSampleRequest, context: Context) -> pb.RenewSampleResponse:
        """Extend a sample lease."""
        run, lease_id = self._leased(request)
        message = pb.RenewSampleResponse(lease=duration_of(self.wall(run.renew(lease_id, self.desk.moment()))))
        self.desk.contact(run)
        self.desk.rearm(run)
        await self.desk.durable()
        return message

    async def ReleasePayload(self, request: pb.ReleasePayloadRequest, context: Context) -> pb.ReleasePayloadResponse:
        """The payload bytes of a committed lease may go."""
        run, lease_id = self._leased(request)
        had = bool(run.state.leases.require(lease_id).groups)
        freed = run.release_payload(lease_id)
        if had:
            self.desk.record(run, st.Record(release_payload=lease_id), self.desk.moment())
        self.desk.contact(run)
        await self.desk.durable()
        return pb.ReleasePayloadResponse(bytes_released=int64(freed))

    def _leased(self, request: Any) -> tuple[Run, str]:
        run = self.run(request.run_id)
        run.check_epoch(optional_epoch(request))
        return run, require_id("lease_id", request.lease_id)

    def _ended(self, run: Run, lease_id: str) -> None:
        self.desk.contact(run)
        self.desk.changed(run, run.partition(run.state.leases.require(lease_id).partition))


def _progress_interval(request: Any) -> float:
    if not request.HasField("progress_interval"):
        return PROGRESS_INTERVAL_S
    interval = duration_seconds(request.progress_interval, "progress_interval")
    if interval < MIN_PROGRESS_INTERVAL_S:
        message = f"progress_interval must be at least {MIN_PROGRESS_INTERVAL_S} s, it is {interval:g} s"
        raise invalid_argument("progress_interval", message, value=interval, reason="OUT_OF_RANGE")
    return interval
