"""The run's engine controller, through its stub.

Invariant: every call that is no stream has a deadline.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from services.runtime.errors import TurnoutError
from services.runtime.waits import duration_of
from services.scheduler.domain.holdings import Gpu
from services.scheduler.links import Link, errors_of, stream_of
from turnout.engine.v1 import engine_pb2, engine_pb2_grpc

T = TypeVar("T")

UNREACHABLE: Final = "ENGINE_UNREACHABLE"


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
    """What ListReplicas says: hybrids by id, and under which incarnation and epoch.

    `incarnation` is empty of a controller that no run was bound to yet.
    """

    incarnation: str
    epoch: int
    hybrids: Mapping[str, Hybrid]

    @property
    def bound(self) -> bool:
        """Whether the controller knows the run."""
        return bool(self.incarnation)

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
        self._replica_timeout = None if engine_timeout_s is None else duration_of(engine_timeout_s)

    async def replicas(self, *, probed: bool = False) -> Replicas:
        """The hybrid replicas as their controller knows them. One that no run was bound to yet has none.

        `probed`: the engines of those that were free are asked now, and not what they told last.
        """
        request = engine_pb2.ListReplicasRequest(run_id=self._run_id, probe=probed)
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

    async def begin_lend(
        self, epoch: int, lend_id: str, placement: engine_pb2.Placement | None, *, keep_sessions: bool
    ) -> tuple[str, ...]:
        """Routes HELD, weights awake; the replicas that wait for weights. `placement`: where requests go on."""
        request = engine_pb2.BeginLendRequest(
            run_id=self._run_id,
            epoch=epoch,
            lend_id=lend_id,
            keep_sessions=keep_sessions,
            timeout=self._replica_timeout,
            placement=placement,
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
        request = engine_pb2.WatchReplicasRequest(run_id=self._run_id)
        return stream_of(lambda: self._parked.WatchReplicas(request), UNREACHABLE, self.target)

    def watch_progress(self, interval_s: float) -> AsyncGenerator[engine_pb2.WatchProgressResponse, None]:
        """A reading of everything that runs every `interval_s` domain seconds."""
        request = engine_pb2.WatchProgressRequest(run_id=self._run_id, interval=duration_of(interval_s))
        return stream_of(lambda: self._parked.WatchProgress(request), UNREACHABLE, self.target)

    async def progress(self, timeout_s: float) -> engine_pb2.ProgressReport:
        """A reading of everything that runs, now."""
        request = engine_pb2.GetProgressRequest(run_id=self._run_id)
        return (await self._call(self._stub.GetProgress(request, timeout=timeout_s))).report

    async def _call(self, call: Awaitable[T]) -> T:
        async with errors_of(UNREACHABLE, self.target):
            return await call
