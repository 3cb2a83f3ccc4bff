"""A mini-batch that was handed out, and what becomes of it.

Invariants: leaving the block of a batch that is still open commits it, or releases it if the block raised; payload
bytes go only after the commit; a batch that was given back is asked for under another request id.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, Sampled
from turnout.client._link import run_blocking
from turnout.client._payloads import Bytes
from turnout.stores import Stores


class AsyncBatch:
    """Groups under a lease: commit them once they are trained on, or release them.

    As a context manager it commits at the end, and releases if the block raises.
    """

    def __init__(
        self,
        buffer: AsyncBufferClient,
        sampled: Sampled,
        stores: Stores,
        *,
        run_id: str,
        epoch: int,
        on_release: Callable[[], None],
    ) -> None:
        self._buffer = buffer
        self._stores = stores
        self._run_id = run_id
        self._epoch = epoch
        self._on_release = on_release
        self._open = True
        self.groups = sampled.groups
        """The groups, oldest first, with rewards, segments, tags and references to payloads."""
        self.lease_id = sampled.done.lease_id
        """The lease."""
        self.metrics: dict[str, float] = {**sampled.done.metrics, **sampled.done.evictions.metrics}
        """Staleness of the batch and what was evicted while waiting, under verl's names."""
        self.depth = sampled.done.depth
        """The depth after the batch was taken."""

    @property
    def outputs(self) -> list[buffer_pb2.Output]:
        """All outputs, by group, trajectory and position."""
        return [output for group in self.groups for trajectory in group.trajectories for output in trajectory.outputs]

    @property
    def tokens(self) -> int:
        """Tokens generated, in the run's unit."""
        return sum(segment.tokens for output in self.outputs for segment in output.segments)

    async def payloads(self) -> list[Bytes]:
        """Fetch the payload of every output, in the order of `outputs`; empty bytes for one without.

        They are bytes, or read-only memory that a store shares. Raises DataLoss, FailedPrecondition / UNKNOWN_STORE
        naming what is missing in `TrainerSetup.stores`, and what the stores raise.
        """
        outputs = self.outputs
        refs = [output.payload.ref for output in outputs if output.payload.HasField("ref")]
        own = [ref for ref in refs if not ref.store]
        external = [ref for ref in refs if ref.store]
        by_key: dict[tuple[str, str], Bytes] = {}
        if external:
            found = await self._buffer.link.blocking(self._stores.get, external)
            by_key.update(zip([(ref.store, ref.id) for ref in external], found, strict=True))
        fetched = self._buffer.get_payloads(self._run_id, own, lease_id=self.lease_id)
        data = [item async for item in fetched]
        by_key.update(zip([("", ref.id) for ref in own], data, strict=True))
        return [
            by_key.get((output.payload.ref.store, output.payload.ref.id), output.payload.inline) for output in outputs
        ]

    async def commit(self, *, keep_payloads: bool = False) -> None:
        """Declare the groups consumed. Their payloads may go, unless they are kept until the lease time ends."""
        await self._buffer.calls.CommitSample(
            buffer_pb2.CommitSampleRequest(run_id=self._run_id, epoch=self._epoch, lease_id=self.lease_id)
        )
        self._open = False
        if not keep_payloads:
            await self.release_payloads()

    async def release_payloads(self) -> None:
        """Let the payload bytes of a committed batch go."""
        await self._buffer.calls.ReleasePayload(
            buffer_pb2.ReleasePayloadRequest(run_id=self._run_id, epoch=self._epoch, lease_id=self.lease_id)
        )

    async def release(self) -> None:
        """Give the groups back; the next sample of the same mini-batch is a new one."""
        await self._buffer.calls.ReleaseSample(
            buffer_pb2.ReleaseSampleRequest(run_id=self._run_id, epoch=self._epoch, lease_id=self.lease_id)
        )
        self._open = False
        self._on_release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            await (self.commit() if error is None else self.release())


class Batch:
    """The same, blocking."""

    def __init__(self, core: AsyncBatch) -> None:
        self._core = core
        self.groups = core.groups
        """The groups, oldest first, with rewards, segments, tags and references to payloads."""
        self.lease_id = core.lease_id
        """The lease."""
        self.metrics = core.metrics
        """Staleness of the batch and what was evicted while waiting, under verl's names."""
        self.depth = core.depth
        """The depth after the batch was taken."""

    @property
    def outputs(self) -> list[buffer_pb2.Output]:
        """All outputs, by group, trajectory and position."""
        return self._core.outputs

    @property
    def tokens(self) -> int:
        """Tokens generated, in the run's unit."""
        return self._core.tokens

    def payloads(self) -> list[Bytes]:
        """See AsyncBatch."""
        return run_blocking(self._core.payloads())

    def commit(self, *, keep_payloads: bool = False) -> None:
        """See AsyncBatch."""
        run_blocking(self._core.commit(keep_payloads=keep_payloads))

    def release_payloads(self) -> None:
        """See AsyncBatch."""
        run_blocking(self._core.release_payloads())

    def release(self) -> None:
        """See AsyncBatch."""
        run_blocking(self._core.release())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._core.__aexit__(kind, error, trace))
