"""Clients of the replay buffer.

Invariants: a batch is handed out once and whole, however often its Sample was armed; a watch of groups goes on behind
the last event that was yielded; a payload arrives whole and unharmed or raises DataLoss.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.client._calls import BlockingCallChannel, duration, new_request_id
from turnout.client._client import AsyncClient, Client
from turnout.client._errors import TurnoutError, is_retryable, stream_ended
from turnout.client._link import Link, iterate_blocking, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._payloads import INLINE_BYTES, Bytes, Download, join, put_frames, size_of
from turnout.client._refills import PaysRefills, RefillFn, Refills
from turnout.client._retry import Outage
from turnout.client._waits import UNFINISHED, Arming, Meanwhile, ProgressFn

_log = logging.getLogger("turnout")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a Sample brought."""

    done: buffer_pb2.SampleDone
    """How it ended."""
    groups: list[buffer_pb2.SampledGroup]
    """The batch, oldest first; empty unless done.outcome is REACHED."""


class AsyncBufferClient(AsyncClient):
    """The replay buffer, for asyncio. `calls` has every call of the contract, the methods what needs more than one."""

    def __init__(
        self,
        target: str,
        options: ClientOptions | None = None,
        *,
        rng: random.Random | None = None,
        link: Link | None = None,
    ) -> None:
        """See AsyncClient."""
        super().__init__(target, options, rng=rng, link=link)
        self.calls: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(cast(Any, self._channel))
        """Every call, by its name in the contract: `await client.calls.AddGroups(request, timeout=...)`."""

    async def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the service."""
        return (await self.calls.GetRun(buffer_pb2.GetRunRequest(run_id=run_id))).incarnation

    def refills(self, refill_fn: RefillFn | None, *, run_id: str, partition: str, epoch: int | None) -> Refills:
        """Return what answers REFILL_DUE; keep it for the whole run, so that what is owed outlives a failed wait."""
        return Refills(self.calls, self.link, refill_fn, run_id=run_id, partition=partition, epoch=epoch)

    async def wait_for_sampleable(
        self,
        request: buffer_pb2.WaitForSampleableRequest,
        *,
        refill_fn: RefillFn | None = None,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> buffer_pb2.WaitDone:
        """Wait until request.target groups are sampleable; consumes nothing.

        `refill_fn(count)` is called, or awaited, from inside the wait when prompts are needed. The outcome says how the
        wait ended; being cut off is no outcome: the wait is armed again with what is left of max_wait.
        """
        refills = refills or self._refills_of(request, refill_fn)

        def arm(arming: Arming) -> buffer_pb2.WaitForSampleableRequest:
            armed = buffer_pb2.WaitForSampleableRequest()
            armed.CopyFrom(request)
            armed.max_wait.CopyFrom(duration(arming.max_wait))
            return armed

        done = await self._hold(
            self.calls.WaitForSampleable,
            arm,
            request,
            again=lambda done: done.outcome in UNFINISHED,
            refills=refills,
            on_progress=on_progress,
        )
        return cast(buffer_pb2.WaitDone, done)

    async def sample(
        self,
        request: buffer_pb2.SampleRequest,
        *,
        refill_fn: RefillFn | None = None,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Sampled:
        """Wait for request.batch groups and lease them. Only the outcome REACHED carries a lease and groups.

        One request id goes through all armings, so the batch is handed out once even if the answer was lost on the way.
        `meanwhile`: what else there may be to do on this thread while it waits.
        """
        refills = refills or self._refills_of(request, refill_fn)
        request_id = request.request_id or new_request_id()
        groups: list[buffer_pb2.SampledGroup] = []

        def arm(arming: Arming) -> buffer_pb2.SampleRequest:
            # The manifest comes in parts, all of them again with each arming.
            groups.clear()
            armed = buffer_pb2.SampleRequest()
            armed.CopyFrom(request)
            armed.request_id = request_id
            armed.max_wait.CopyFrom(duration(arming.max_wait))
            return armed

        def torn(done: buffer_pb2.SampleDone) -> bool:
            return done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED and done.group_count != len(groups)

        done = await self._hold(
            self.calls.Sample,
            arm,
            request,
            again=lambda done: done.outcome in UNFINISHED or torn(done),
            refills=refills,
            on_progress=on_progress,
            on_groups=lambda part: groups.extend(part.groups),
            meanwhile=meanwhile,
        )
        if torn(done):
            raise stream_ended(f"the manifest arrived with {len(groups)} of {done.group_count} groups")
        return Sampled(done, groups)

    async def watch_depth(self, request: buffer_pb2.WatchDepthRequest) -> AsyncGenerator[buffer_pb2.Depth, None]:
        """Yield the depth: at once, then after changes. It goes on after a restart of the service."""
        async with aclosing(self._follow(self.calls.WatchDepth, lambda: request)) as messages:
            async for message in messages:
                yield message.depth

    async def watch_groups(self, request: buffer_pb2.WatchGroupsRequest) -> AsyncGenerator[buffer_pb2.GroupEvent, None]:
        """Yield what happens to groups; after a cut it goes on with the event after the last one seen."""
        armed = buffer_pb2.WatchGroupsRequest()
        armed.CopyFrom(request)
        async with aclosing(self._follow(self.calls.WatchGroups, lambda: armed)) as messages:
            async for message in messages:
                for event in message.events:
                    if event.sequence:
                        # Progress events have none.
                        armed.from_sequence = event.sequence + 1
                    yield event

    async def watch_releases(self, run_id: str, store: str) -> AsyncGenerator[list[buffer_pb2.PayloadRef], None]:
        """Yield the references of an external store that may be deleted there, until AckReleases has answered them.

        After a cut all that is not acknowledged comes again. It ends when the run is gone and all is acknowledged.
        """
        request = buffer_pb2.WatchReleasesRequest(run_id=run_id, store=store)
        given_up = 0
        async with aclosing(self._follow(self.calls.WatchReleases, lambda: request)) as messages:
            async for message in messages:
                if message.given_up > given_up:
                    given_up = message.given_up
                    _log.warning("run %s gave up %d releases that nobody acknowledged in time", run_id, given_up)
                if message.refs:
                    yield list(message.refs)

    async def payload(self, run_id: str, data: Bytes | Sequence[Bytes], content_type: str = "") -> buffer_pb2.Payload:
        """Return bytes, or a sequence of them, as a Payload: inline up to 256 KiB, uploaded beyond."""
        if size_of(data) <= INLINE_BYTES:
            return buffer_pb2.Payload(inline=join(data), content_type=content_type)
        return buffer_pb2.Payload(ref=await self.put_payload(run_id, data), content_type=content_type)

    async def put_payload(self, run_id: str, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Upload bytes, or a sequence of them; repeated from the start if the service goes away meanwhile."""

        async def send(timeout: float) -> buffer_pb2.PayloadRef:
            return (await self.calls.PutPayload(put_frames(run_id, data), timeout=timeout)).ref

        return await self._upload(send)

    async def get_payloads(
        self,
        run_id: str,
        refs: Sequence[buffer_pb2.PayloadRef],
        *,
        lease_id: str = "",
        claim: buffer_pb2.ClaimToken | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of each reference, in order. A torn download resumes where it was cut. Raises DataLoss."""
        link, times = self.link, self.options.timeouts
        download = Download(refs)
        outage = Outage(self.options.retry, self._policy.rng, now=link.now(), limit=times.transfer)
        while not download.complete:
            left, resume_at = download.resume()
            request = buffer_pb2.GetPayloadsRequest(
                run_id=run_id, lease_id=lease_id, claim=claim, refs=left, resume_at=resume_at
            )
            outage.began(link.now())
            frames = self.calls.GetPayloads(request, timeout=times.transfer)
            try:
                async for frame in frames:
                    outage.heard(link.now())
                    data = download.take(frame)
                    if data is not None:
                        yield data
                if download.complete:
                    return
                raise stream_ended("the download ended before its last payload")
            except TurnoutError as error:
                pause = outage.pause(link.now(), error.retry_after) if is_retryable(error) else None
                if pause is None:
                    raise
            finally:
                frames.cancel()
            await link.sleep(pause)

    def _refills_of(self, request: Any, refill_fn: RefillFn | None) -> Refills:
        epoch = request.epoch if request.HasField("epoch") else None
        return self.refills(refill_fn, run_id=request.run_id, partition=request.partition, epoch=epoch)


class BufferClient(Client):
    """The replay buffer, blocking. The methods are those of AsyncBufferClient; callbacks run on the calling thread."""

    def __init__(self, target: str, options: ClientOptions | None = None, *, rng: random.Random | None = None) -> None:
        """See Client."""
        super().__init__(target, options, rng=rng)
        self.core = AsyncBufferClient(target, self.options, rng=rng, link=self.link)
        self.calls: buffer_pb2_grpc.ReplayBufferStub = buffer_pb2_grpc.ReplayBufferStub(
            cast(Any, BlockingCallChannel(self._policy))
        )
        """Every call, by its name in the contract: `client.calls.AddGroups(request, timeout=...)`."""

    def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the service."""
        return run_blocking(self.core.incarnation(run_id))

    def refills(self, refill_fn: RefillFn | None, *, run_id: str, partition: str, epoch: int | None) -> Refills:
        """See AsyncBufferClient."""
        return self.core.refills(refill_fn, run_id=run_id, partition=partition, epoch=epoch)

    def wait_for_sampleable(
        self,
        request: buffer_pb2.WaitForSampleableRequest,
        *,
        refill_fn: RefillFn | None = None,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> buffer_pb2.WaitDone:
        """See AsyncBufferClient."""
        return run_blocking(
            self.core.wait_for_sampleable(request, refill_fn=refill_fn, refills=refills, on_progress=on_progress)
        )

    def sample(
        self,
        request: buffer_pb2.SampleRequest,
        *,
        refill_fn: RefillFn | None = None,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> Sampled:
        """See AsyncBufferClient."""
        return run_blocking(self.core.sample(request, refill_fn=refill_fn, refills=refills, on_progress=on_progress))

    def watch_depth(self, request: buffer_pb2.WatchDepthRequest) -> Generator[buffer_pb2.Depth, None, None]:
        """See AsyncBufferClient."""
        return iterate_blocking(self.core.watch_depth(request))

    def watch_groups(self, request: buffer_pb2.WatchGroupsRequest) -> Generator[buffer_pb2.GroupEvent, None, None]:
        """See AsyncBufferClient."""
        return iterate_blocking(self.core.watch_groups(request))

    def watch_releases(self, run_id: str, store: str) -> Generator[list[buffer_pb2.PayloadRef], None, None]:
        """See AsyncBufferClient."""
        return iterate_blocking(self.core.watch_releases(run_id, store))

    def payload(self, run_id: str, data: Bytes | Sequence[Bytes], content_type: str = "") -> buffer_pb2.Payload:
        """See AsyncBufferClient."""
        return run_blocking(self.core.payload(run_id, data, content_type))

    def put_payload(self, run_id: str, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """See AsyncBufferClient."""
        return run_blocking(self.core.put_payload(run_id, data))

    def get_payloads(
        self,
        run_id: str,
        refs: Sequence[buffer_pb2.PayloadRef],
        *,
        lease_id: str = "",
        claim: buffer_pb2.ClaimToken | None = None,
    ) -> Generator[bytes, None, None]:
        """See AsyncBufferClient."""
        return iterate_blocking(self.core.get_payloads(run_id, refs, lease_id=lease_id, claim=claim))
