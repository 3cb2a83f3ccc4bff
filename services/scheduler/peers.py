"""The run's replay buffer and engine controller, through their stubs.

Invariants: every call that is no stream has a deadline; an error of a peer becomes an error of ours, that of a silent
peer UNAVAILABLE naming it; loopback and Unix sockets are reached directly, whatever proxy the environment names.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from services.runtime.errors import Code, TurnoutError, failed_precondition, invalid_argument, unavailable
from services.runtime.statuses import from_rpc_error
from services.scheduler.domain.events import EvictionReason
from services.scheduler.domain.holdings import Gpu
from services.scheduler.domain.run import Depth
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.engine.v1 import engine_pb2, engine_pb2_grpc

T = TypeVar("T")

BUFFER = "BUFFER_UNREACHABLE"
ENGINE = "ENGINE_UNREACHABLE"

_MAX_MESSAGE_BYTES: Final = 64 << 20
"""ListReplicas and progress of a large run pass the 4 MiB that gRPC allows by default."""

_KEEPALIVE_MS: Final = 10_000
_KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""A peer whose machine is gone is noticed within 15 s, also while nothing but a watch is open."""

_MAX_BACKOFF_MS: Final = 2_000
"""A peer that was restarted is found again within about this time; gRPC's own default is two minutes."""


_PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Where gRPC finds a proxy, the first that is set."""


def _is_local(target: str) -> bool:
    """Whether a target is this machine: a proxy must not get in between."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition("/")[2].removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(target: str) -> list[tuple[str, int]]:
    """The options of a channel to `target`."""
    options = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
    ]
    if _is_local(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


@dataclass(frozen=True, slots=True)
class Link:
    """The way to one peer.

    Parked streams have a connection of their own, so that they never stand in the way of the call that releases them.
    """

    control: grpc.aio.Channel
    parked: grpc.aio.Channel


class Links:
    """One link per target, shared by all runs."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def get(self, field: str, target: str) -> Link:
        """The link to `target`. An empty target is INVALID_ARGUMENT naming `field`."""
        if not target:
            raise invalid_argument(field, f"{field} must not be empty", value=target)
        if target not in self._links:
            self._links[target] = Link(
                grpc.aio.insecure_channel(target, options=channel_options(target)),
                grpc.aio.insecure_channel(
                    target, options=[*channel_options(target), ("grpc.use_local_subchannel_pool", 1)]
                ),
            )
        return self._links[target]

    async def close(self) -> None:
        """Close them all."""
        for link in self._links.values():
            await link.control.close()
            await link.parked.close()
        self._links.clear()


@asynccontextmanager
async def _errors_of(reason: str, target: str) -> AsyncIterator[None]:
    """Turn what a stub raises into our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _translated(from_rpc_error(error), reason, target) from error


def _translated(error: TurnoutError, reason: str, target: str) -> TurnoutError:
    # A status without our ErrorInfo has its code as reason: the transport speaks, not the peer.
    silent = error.reason == error.code.name
    if silent and error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNKNOWN, Code.CANCELLED):
        peer = reason.partition("_")[0].lower()
        message = f"the {peer} at {target} did not answer: {error.message}"
        metadata = {"target": target, "code": error.code.name}
        variable = None if _is_local(target) else next(filter(os.environ.get, _PROXY_VARIABLES), None)
        if variable is not None:
            message += f" (the environment's {variable} sends this through a proxy)"
            metadata["proxy_variable"] = variable
        return unavailable(reason, message, **metadata)
    return error


def unanswered(error: TurnoutError) -> bool:
    """Whether `error` says that a peer could not be reached or is stopping: to be tried again."""
    return error.code is Code.UNAVAILABLE


def seconds(value: float) -> Duration:
    """A protobuf Duration of `value` seconds."""
    whole = int(value // 1)
    return Duration(seconds=whole, nanos=min(999_999_999, round((value - whole) * 1e9)))


def depth_of(depth: buffer_pb2.Depth) -> Depth:
    """A depth as the domain has it."""
    return Depth(
        step=depth.step,
        sampleable=depth.sampleable,
        in_flight=depth.counts.pending + depth.counts.running,
        unpaid_credits=depth.unpaid_credits,
        held=depth.HasField("hold"),
    )


@dataclass(frozen=True, slots=True)
class BufferState:
    """What OpenRun asks the buffer. `step`: the highest that its trainer's calls carried."""

    epoch: int
    step: int


class BufferPeer:
    """The replay buffer of one run."""

    def __init__(self, link: Link, target: str, run_id: str, partition: str, timeout_s: float) -> None:
        self._stub: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(link.control)
        self._parked: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(link.parked)
        self.target = target
        self._run_id = run_id
        self._partition = partition
        self._timeout_s = timeout_s

    async def state(self) -> BufferState:
        """Epoch and step of the run in the buffer."""
        answer = await self._call(self._stub.GetRun(buffer_pb2.GetRunRequest(run_id=self._run_id), timeout=self._t))
        return BufferState(answer.run.epoch, answer.run.current_step)

    async def open_epoch(self, epoch: int) -> None:
        """Fence off earlier trainers."""
        request = buffer_pb2.OpenEpochRequest(run_id=self._run_id, epoch=epoch)
        await self._call(self._stub.OpenEpoch(request, timeout=self._t))

    async def renew_epoch(self, epoch: int) -> None:
        """Extend the sample leases of the epoch."""
        request = buffer_pb2.RenewEpochRequest(run_id=self._run_id, epoch=epoch)
        await self._call(self._stub.RenewEpoch(request, timeout=self._t))

    async def depth(self, step: int) -> Depth:
        """The depth at `step`; a reader's call, which evicts nothing."""
        return depth_of(await self.raw_depth(step))

    async def raw_depth(self, step: int) -> buffer_pb2.Depth:
        """The same as the buffer tells it."""
        request = buffer_pb2.GetSampleableCountRequest(run_id=self._run_id, partition=self._partition, step=step)
        return (await self._call(self._stub.GetSampleableCount(request, timeout=self._t))).depth

    async def cursor_now(self, epoch: int | None, step: int, cursor: int) -> buffer_pb2.WaitDone:
        """What was evicted since `cursor`: a wait for nothing."""
        async for event in self.wait(epoch, step, 0, cursor, 0.0):
            if event.HasField("done"):
                return event.done
        raise unavailable(BUFFER, f"the buffer at {self.target} ended a wait without its final event")

    async def check_can_wait(self, step: int) -> None:
        """Raise FAILED_PRECONDITION / BUFFER_CANNOT_WAIT unless the buffer tells its depth and waits on it."""
        try:
            await self.depth(step)
            await self.cursor_now(None, step, 0)
        except TurnoutError as error:
            if error.code is not Code.UNIMPLEMENTED:
                raise
            raise failed_precondition(
                "BUFFER_CANNOT_WAIT",
                f"the buffer at {self.target} cannot wait on depth, which switching needs: {error.message}",
                field="buffer_target",
                value=self.target,
            ) from error

    async def wait(
        self, epoch: int | None, step: int, target: int, cursor: int, max_wait_s: float
    ) -> AsyncGenerator[buffer_pb2.WaitForSampleableResponse, None]:
        """The events of one wait of at most `max_wait_s` wall seconds. Closing the iterator ends the wait."""
        request = buffer_pb2.WaitForSampleableRequest(
            run_id=self._run_id,
            partition=self._partition,
            epoch=epoch,
            step=step,
            target=target,
            cursor=cursor,
            max_wait=seconds(max_wait_s),
        )
        call = self._parked.WaitForSampleable(request, timeout=max_wait_s + self._timeout_s)
        try:
            async with _errors_of(BUFFER, self.target):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def next_group_event(self) -> int | None:
        """Sequence number of the group event that comes next, None if the buffer does not list groups."""
        request = buffer_pb2.ListGroupsRequest(run_id=self._run_id, partition=self._partition, page_size=1)
        try:
            answer = await self._call(self._stub.ListGroups(request, timeout=self._t))
        except TurnoutError as error:
            if error.code is not Code.UNIMPLEMENTED:
                raise
            return None
        return answer.event_sequence + 1

    def watch_groups(self, start: int | None) -> AsyncGenerator[buffer_pb2.WatchGroupsResponse, None]:
        """Group events from sequence number `start`, or from now on."""
        request = buffer_pb2.WatchGroupsRequest(run_id=self._run_id, from_sequence=start)
        return _stream(self._parked.WatchGroups(request), BUFFER, self.target)

    async def checkpoint(self, epoch: int, step: int, checkpoint_id: str, timeout_s: float) -> str:
        """Save the buffer; the checkpoint's id."""
        request = buffer_pb2.CheckpointRequest(run_id=self._run_id, epoch=epoch, step=step, checkpoint_id=checkpoint_id)
        answer = await self._call(self._stub.Checkpoint(request, timeout=timeout_s))
        return answer.checkpoint.checkpoint_id

    async def restore(self, epoch: int, checkpoint_id: str, request_id: str, timeout_s: float) -> int:
        """Roll the buffer back; the eviction cursor to go on with."""
        request = buffer_pb2.RestoreRequest(
            run_id=self._run_id, epoch=epoch, checkpoint_id=checkpoint_id, request_id=request_id
        )
        return (await self._call(self._stub.Restore(request, timeout=timeout_s))).cursor

    @property
    def _t(self) -> float:
        return self._timeout_s

    async def _call(self, call: Awaitable[T]) -> T:
        async with _errors_of(BUFFER, self.target):
            return await call


async def _stream(call: Any, reason: str, target: str) -> AsyncGenerator[Any, None]:
    try:
        async with _errors_of(reason, target):
            async for message in call:
                yield message
    finally:
        call.cancel()


@dataclass(frozen=True, slots=True)
class Hybrid:
    """One hybrid replica as the controller sees it."""

    replica_id: str
    gpus: tuple[Gpu, ...]
    free: bool
    serving: bool
    in_use: bool
    """Its route is not OUT, or it takes part in a lend."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """What ListReplicas says: hybrids by id, and under which incarnation and epoch."""

    incarnation: str
    epoch: int
    hybrids: Mapping[str, Hybrid]

    @property
    def free(self) -> dict[str, bool]:
        """Whether each hybrid is confirmed free."""
        return {replica_id: hybrid.free for replica_id, hybrid in self.hybrids.items()}

    @property
    def gpus(self) -> list[Gpu]:
        """All devices of the hybrids."""
        return [gpu for hybrid in self.hybrids.values() for gpu in hybrid.gpus]


def hybrid_of(replica: engine_pb2.Replica) -> Hybrid:
    """A hybrid replica as the domain has it."""
    route = replica.route
    return Hybrid(
        replica_id=replica.spec.replica_id,
        gpus=tuple(Gpu(gpu.node, gpu.uuid) for gpu in replica.spec.gpus),
        free=replica.confirmed_free,
        serving=route == engine_pb2.ROUTE_STATE_SERVING,
        in_use=route in (engine_pb2.ROUTE_STATE_HELD, engine_pb2.ROUTE_STATE_SERVING) or bool(replica.lend_id),
    )


class EnginePeer:
    """The engine controller of one run. `engine_timeout_s`: for one replica, None leaves it to the controller."""

    def __init__(
        self,
        link: Link,
        target: str,
        run_id: str,
        timeout_s: float,
        transition_timeout_s: float,
        engine_timeout_s: float | None,
    ) -> None:
        self._stub: engine_pb2_grpc.EngineControllerAsyncStub = engine_pb2_grpc.EngineControllerStub(link.control)
        self._parked: engine_pb2_grpc.EngineControllerAsyncStub = engine_pb2_grpc.EngineControllerStub(link.parked)
        self.target = target
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._transition_timeout_s = transition_timeout_s
        self._replica_timeout = None if engine_timeout_s is None else seconds(engine_timeout_s)

    async def replicas(self) -> Replicas:
        """The hybrid replicas as they are now. A controller that no run was bound to yet has none."""
        request = engine_pb2.ListReplicasRequest(run_id=self._run_id)
        try:
            answer = await self._call(self._stub.ListReplicas(request, timeout=self._timeout_s))
        except TurnoutError as error:
            if error.reason != "RUN_NOT_FOUND":
                raise
            # Not bound to this run: OpenEpoch binds it, or says that another run is bound.
            return Replicas("", 0, {})
        hybrids = [hybrid_of(r) for r in answer.replicas if r.spec.role == engine_pb2.REPLICA_ROLE_HYBRID]
        return Replicas(answer.incarnation, answer.epoch, {hybrid.replica_id: hybrid for hybrid in hybrids})

    async def open_epoch(self, epoch: int) -> None:
        """Fence off earlier trainers and bind the controller to the run. It undoes their lends and updates first."""
        request = engine_pb2.OpenEpochRequest(run_id=self._run_id, epoch=epoch)
        await self._call(self._stub.OpenEpoch(request, timeout=self._transition_timeout_s))

    async def begin_lend(self, epoch: int, lend_id: str, *, keep_sessions: bool) -> tuple[str, ...]:
        """Routes HELD, weights awake; the replicas that wait for weights."""
        request = engine_pb2.BeginLendRequest(
            run_id=self._run_id,
            epoch=epoch,
            lend_id=lend_id,
            keep_sessions=keep_sessions,
            timeout=self._replica_timeout,
        )
        answer = await self._call(self._stub.BeginLend(request, timeout=self._transition_timeout_s))
        return tuple(answer.replica_ids)

    async def finish_lend(self, epoch: int, lend_id: str, weight_version: int) -> None:
        """Let the lent replicas serve."""
        request = engine_pb2.FinishLendRequest(
            run_id=self._run_id,
            epoch=epoch,
            lend_id=lend_id,
            weight_version=weight_version,
            timeout=self._replica_timeout,
        )
        await self._call(self._stub.FinishLend(request, timeout=self._transition_timeout_s))

    async def abort_lend(self, epoch: int, lend_id: str) -> None:
        """Undo a lend, however far it came."""
        request = engine_pb2.AbortLendRequest(
            run_id=self._run_id, epoch=epoch, lend_id=lend_id, timeout=self._replica_timeout
        )
        await self._call(self._stub.AbortLend(request, timeout=self._transition_timeout_s))

    async def reclaim(self, epoch: int) -> None:
        """Take all hybrids back."""
        request = engine_pb2.ReclaimRequest(run_id=self._run_id, epoch=epoch, timeout=self._replica_timeout)
        await self._call(self._stub.Reclaim(request, timeout=self._transition_timeout_s))

    def watch_replicas(self) -> AsyncGenerator[engine_pb2.WatchReplicasResponse, None]:
        """All replicas, then those that change."""
        call = self._parked.WatchReplicas(engine_pb2.WatchReplicasRequest(run_id=self._run_id))
        return _stream(call, ENGINE, self.target)

    def watch_progress(self, interval_s: float) -> AsyncGenerator[engine_pb2.WatchProgressResponse, None]:
        """A reading of everything that runs every `interval_s` domain seconds."""
        request = engine_pb2.WatchProgressRequest(run_id=self._run_id, interval=seconds(interval_s))
        return _stream(self._parked.WatchProgress(request), ENGINE, self.target)

    async def _call(self, call: Awaitable[T]) -> T:
        async with _errors_of(ENGINE, self.target):
            return await call


def reasons_of(reasons: Any) -> tuple[EvictionReason, ...]:
    """Eviction reasons that the domain knows."""
    known = {reason.value for reason in EvictionReason}
    return tuple(EvictionReason(reason) for reason in reasons if reason in known)
