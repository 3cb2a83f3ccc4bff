"""A buffer and an engine controller that do as they are told, and write down in which order they were called."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from services.runtime.config import ServiceSettings
from services.runtime.errors import TurnoutError, failed_precondition, not_found, unimplemented
from services.runtime.host import HostContext, HostedService, ServiceHost
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.engine.v1 import engine_pb2, engine_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Changes:
    """Wakes who waits for a change since they looked, however many wait and whoever comes first."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = asyncio.Condition()

    async def tell(self) -> None:
        """Something changed."""
        self.number += 1
        async with self._changed:
            self._changed.notify_all()

    async def since(self, number: int) -> None:
        """Return once something has changed since `number` was read."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.number != number)


@dataclass
class Script:
    """What a fake does at each call: note it, wait for a gate, fail."""

    journal: list[str] = field(default_factory=list)
    failures: dict[str, list[TurnoutError]] = field(default_factory=lambda: defaultdict(list))
    """Errors that the next calls of a method end with, one each."""
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """Calls of a method wait until its gate is set."""
    arrived: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """Set when a call of the method arrives."""

    async def enter(self, method: str) -> None:
        self.journal.append(method)
        self.arrived[method].set()
        if method in self.gates:
            await self.gates[method].wait()
        if self.failures[method]:
            raise self.failures[method].pop(0)


class FakeBuffer(buffer_pb2_grpc.ReplayBufferServicer):
    """Depth is whatever the test sets; waits end when it reaches their target."""

    def __init__(self, journal: list[str]) -> None:
        self.script = Script(journal)
        self.runs: dict[str, buffer_pb2.Run] = {}
        self.unimplemented: set[str] = set()
        self.depth = buffer_pb2.Depth(counts=buffer_pb2.GroupCounts(pending=1000))
        self.checkpoints: list[str] = []
        self.evicted = 0
        self.renewed: list[int] = []
        self.waits: list[buffer_pb2.WaitForSampleableRequest] = []
        self.group_events: list[buffer_pb2.GroupEvent] = []
        self._changes = Changes()
        self._said: list[buffer_pb2.WaitForSampleableResponse] = []
        self.unpaid: dict[str, int] = {}

    def add_run(self, run_id: str, step: int = 0) -> None:
        self.runs[run_id] = buffer_pb2.Run(run_id=run_id, current_step=step)

    def _run(self, run_id: str) -> buffer_pb2.Run:
        if run_id not in self.runs:
            raise not_found("RUN_NOT_FOUND", "no such run", run_id=run_id)
        return self.runs[run_id]

    async def _enter(self, method: str) -> None:
        if method in self.unimplemented:
            raise unimplemented(method)
        await self.script.enter(method)

    async def set_depth(
        self, sampleable: int, *, in_flight: int = 1000, unpaid: int = 0, held: str = "", finished: int = 0
    ) -> None:
        """Change the depth, and wake who waits."""
        self.depth = buffer_pb2.Depth(
            sampleable=sampleable,
            counts=buffer_pb2.GroupCounts(pending=in_flight, finished=finished),
            unpaid_credits=unpaid,
            hold=buffer_pb2.Hold(group_id=held, span=9) if held else None,
        )
        await self._wake()

    async def refill(self, claim_id: str, count: int) -> None:
        """Ask the waiting trainer for prompts, until `unpaid` no longer has the claim."""
        self.unpaid[claim_id] = count
        await self._wake()

    async def _wake(self) -> None:
        await self._changes.tell()

    async def GetRun(self, request: buffer_pb2.GetRunRequest, context: Context) -> buffer_pb2.GetRunResponse:
        await self._enter("GetRun")
        return buffer_pb2.GetRunResponse(run=self._run(request.run_id), incarnation="b1", time_scale=1.0)

    async def OpenEpoch(self, request: buffer_pb2.OpenEpochRequest, context: Context) -> buffer_pb2.OpenEpochResponse:
        await self._enter("buffer.OpenEpoch")
        run = self._run(request.run_id)
        if request.epoch <= run.epoch:
            raise failed_precondition("STALE_EPOCH", "too low", current=run.epoch)
        run.epoch = request.epoch
        return buffer_pb2.OpenEpochResponse(epoch=run.epoch)

    async def RenewEpoch(
        self, request: buffer_pb2.RenewEpochRequest, context: Context
    ) -> buffer_pb2.RenewEpochResponse:
        await self._enter("RenewEpoch")
        self.renewed.append(request.epoch)
        return buffer_pb2.RenewEpochResponse()

    async def GetSampleableCount(
        self, request: buffer_pb2.GetSampleableCountRequest, context: Context
    ) -> buffer_pb2.GetSampleableCountResponse:
        await self._enter("GetSampleableCount")
        return buffer_pb2.GetSampleableCountResponse(depth=self._depth_at(request.step))

    def _depth_at(self, step: int) -> buffer_pb2.Depth:
        depth = buffer_pb2.Depth()
        depth.CopyFrom(self.depth)
        depth.step = step
        return depth

    async def WaitForSampleable(
        self, request: buffer_pb2.WaitForSampleableRequest, context: Context
    ) -> AsyncIterator[buffer_pb2.WaitForSampleableResponse]:
        if request.target or request.HasField("epoch"):
            await self._enter("WaitForSampleable")
            self.waits.append(request)
        elif "WaitForSampleable" in self.unimplemented:
            raise unimplemented("WaitForSampleable")
        answer = buffer_pb2.WaitForSampleableResponse
        shown: set[str] = set()
        told = None
        loop = asyncio.get_running_loop()
        ends = loop.time() + request.max_wait.seconds + request.max_wait.nanos / 1e9
        while True:
            seen = self._changes.number
            depth = self._depth_at(request.step)
            reached = depth.sampleable >= request.target
            if request.target and depth != told:
                told = depth
                yield answer(progress=buffer_pb2.WaitProgress(depth=depth, target=request.target))
            for claim_id, count in self.unpaid.items():
                if claim_id not in shown and request.target:
                    shown.add(claim_id)
                    yield answer(refill_due=buffer_pb2.RefillDue(count=count, refill_claim_id=claim_id))
            if reached and not depth.HasField("hold"):
                yield answer(done=self._done(buffer_pb2.WAIT_OUTCOME_REACHED, request))
                return
            if depth.supply_ended:
                yield answer(done=self._done(buffer_pb2.WAIT_OUTCOME_EXHAUSTED, request))
                return
            left = ends - loop.time()
            if left <= 0:
                outcome = buffer_pb2.WAIT_OUTCOME_HELD if reached else buffer_pb2.WAIT_OUTCOME_TIMED_OUT
                yield answer(done=self._done(outcome, request))
                return
            try:
                async with asyncio.timeout(min(left, 3600)):
                    await self._changes.since(seen)
            except TimeoutError:
                continue

    def _done(
        self, outcome: buffer_pb2.WaitOutcome.ValueType, request: buffer_pb2.WaitForSampleableRequest
    ) -> buffer_pb2.WaitDone:
        since = self.evicted - request.cursor
        name = "training/off_policy/evicted_samples"
        return buffer_pb2.WaitDone(
            outcome=outcome,
            depth=self._depth_at(request.step),
            evictions=buffer_pb2.EvictionMetrics(evicted=since, metrics={name: float(since)} if since else {}),
            next_cursor=self.evicted,
            reason="" if outcome == buffer_pb2.WAIT_OUTCOME_REACHED else "not enough groups",
        )

    async def end_supply(self) -> None:
        """No more prompts will come."""
        self.depth.supply_ended = True
        await self._wake()

    async def tell(self, *events: buffer_pb2.GroupEvent) -> None:
        """Let group events happen."""
        for event in events:
            event.sequence = len(self.group_events) + 1
            event.partition = event.partition or "train"
            self.group_events.append(event)
        await self._wake()

    async def ListGroups(
        self, request: buffer_pb2.ListGroupsRequest, context: Context
    ) -> buffer_pb2.ListGroupsResponse:
        await self._enter("ListGroups")
        return buffer_pb2.ListGroupsResponse(event_sequence=len(self.group_events))

    async def WatchGroups(
        self, request: buffer_pb2.WatchGroupsRequest, context: Context
    ) -> AsyncIterator[buffer_pb2.WatchGroupsResponse]:
        await self._enter("WatchGroups")
        sent = request.from_sequence - 1 if request.HasField("from_sequence") else len(self.group_events)
        while True:
            seen = self._changes.number
            if len(self.group_events) > sent:
                batch = self.group_events[sent:]
                sent = len(self.group_events)
                yield buffer_pb2.WatchGroupsResponse(events=batch)
                continue
            await self._changes.since(seen)

    async def Checkpoint(
        self, request: buffer_pb2.CheckpointRequest, context: Context
    ) -> buffer_pb2.CheckpointResponse:
        await self._enter("Checkpoint")
        self.checkpoints.append(request.checkpoint_id)
        info = buffer_pb2.CheckpointInfo(checkpoint_id=request.checkpoint_id, step=request.step)
        return buffer_pb2.CheckpointResponse(checkpoint=info)

    async def Restore(self, request: buffer_pb2.RestoreRequest, context: Context) -> buffer_pb2.RestoreResponse:
        await self._enter("Restore")
        return buffer_pb2.RestoreResponse(step=self.runs[request.run_id].current_step, cursor=17)


class FakeEngine(engine_pb2_grpc.EngineControllerServicer):
    """Replicas move at once and as asked, unless the script says otherwise."""

    def __init__(self, journal: list[str], run_id: str = "run") -> None:
        self.script = Script(journal)
        self.run_id = run_id
        self.epoch = 0
        self.incarnation = "e1"
        self.replicas: dict[str, engine_pb2.Replica] = {}
        self.lend_id = ""
        self.stubborn: set[str] = set()
        """Replicas that never get free."""
        self.deaf: set[str] = set()
        """Replicas that never serve."""
        self.started_anew: set[str] = set()
        """Replicas whose engine a supervisor started anew, awake, which a probe shows."""
        self.progress: list[engine_pb2.ProgressReport] = []
        self.present = engine_pb2.ProgressReport(covered_share=1.0)
        """What GetProgress answers."""
        self.requests: list[Any] = []
        self.moves: list[tuple[str, str]] = []
        """The calls that moved GPUs, each with the lend it was for."""
        self._changes = Changes()

    def add(self, replica_id: str, *, hybrid: bool = True, gpu: str = "", node: str = "n0") -> None:
        """Register a replica; hybrids are asleep and free."""
        role = engine_pb2.REPLICA_ROLE_HYBRID if hybrid else engine_pb2.REPLICA_ROLE_STANDALONE
        spec = engine_pb2.ReplicaSpec(replica_id=replica_id, role=role)
        spec.gpus.add(node=node, uuid=gpu or f"gpu-{replica_id}")
        route = engine_pb2.ROUTE_STATE_OUT if hybrid else engine_pb2.ROUTE_STATE_SERVING
        self.replicas[replica_id] = engine_pb2.Replica(
            spec=spec, route=route, confirmed_free=hybrid, health=engine_pb2.REPLICA_HEALTH_HEALTHY
        )

    @property
    def all_free(self) -> bool:
        """Whether the trainer may use the memory of all hybrids."""
        return all(replica.confirmed_free for replica in self.hybrids())

    def hybrids(self) -> list[engine_pb2.Replica]:
        return [r for r in self.replicas.values() if r.spec.role == engine_pb2.REPLICA_ROLE_HYBRID]

    async def restart(self, incarnation: str, *, free: bool) -> None:
        """Come back as another incarnation, with hybrids found free or not."""
        self.incarnation = incarnation
        for replica in self.hybrids():
            replica.confirmed_free = free
        await self.wake()

    async def wake(self) -> None:
        """Tell who watches."""
        await self._changes.tell()

    def _check(self, request: Any) -> None:
        if request.HasField("epoch") and request.epoch < self.epoch:
            raise failed_precondition("STALE_EPOCH", "too low", current=self.epoch)

    async def ListReplicas(
        self, request: engine_pb2.ListReplicasRequest, context: Context
    ) -> engine_pb2.ListReplicasResponse:
        await self.script.enter("ListReplicas")
        if request.run_id != self.run_id:
            raise not_found("RUN_NOT_FOUND", "not this run")
        if request.probe:
            for replica_id in self.started_anew:
                self.replicas[replica_id].confirmed_free = False
            self.started_anew.clear()
        return engine_pb2.ListReplicasResponse(
            replicas=list(self.replicas.values()), incarnation=self.incarnation, epoch=self.epoch
        )

    async def OpenEpoch(self, request: engine_pb2.OpenEpochRequest, context: Context) -> engine_pb2.OpenEpochResponse:
        await self.script.enter("engine.OpenEpoch")
        if request.run_id != self.run_id:
            raise failed_precondition("RUN_BOUND", "another run is bound")
        self._check(request)
        self.epoch = request.epoch
        return engine_pb2.OpenEpochResponse(epoch=self.epoch, incarnation=self.incarnation, time_scale=1.0)

    async def BeginLend(self, request: engine_pb2.BeginLendRequest, context: Context) -> engine_pb2.BeginLendResponse:
        self.requests.append(request)
        self._check(request)
        await self.script.enter("BeginLend")
        self.moves.append(("BeginLend", request.lend_id))
        self.lend_id = request.lend_id
        for replica in self.hybrids():
            replica.lend_id = request.lend_id
            replica.route = engine_pb2.ROUTE_STATE_HELD
            replica.confirmed_free = False
        await self.wake()
        return engine_pb2.BeginLendResponse(replica_ids=sorted(r.spec.replica_id for r in self.hybrids()))

    async def FinishLend(
        self, request: engine_pb2.FinishLendRequest, context: Context
    ) -> engine_pb2.FinishLendResponse:
        self.requests.append(request)
        self._check(request)
        await self.script.enter("FinishLend")
        self.moves.append(("FinishLend", request.lend_id))
        for replica in self.hybrids():
            deaf = replica.spec.replica_id in self.deaf
            replica.route = engine_pb2.ROUTE_STATE_OUT if deaf else engine_pb2.ROUTE_STATE_SERVING
        await self.wake()
        if self.deaf:
            raise partial("op-finish", *self.deaf)
        return engine_pb2.FinishLendResponse()

    async def AbortLend(self, request: engine_pb2.AbortLendRequest, context: Context) -> engine_pb2.AbortLendResponse:
        self._check(request)
        await self.script.enter("AbortLend")
        self.moves.append(("AbortLend", request.lend_id))
        await self._free("op-abort")
        return engine_pb2.AbortLendResponse()

    async def Reclaim(self, request: engine_pb2.ReclaimRequest, context: Context) -> engine_pb2.ReclaimResponse:
        self.requests.append(request)
        self._check(request)
        await self.script.enter("Reclaim")
        self.moves.append(("Reclaim", ""))
        await self._free("op-reclaim")
        return engine_pb2.ReclaimResponse(incarnation=self.incarnation)

    async def _free(self, operation_id: str) -> None:
        for replica in self.hybrids():
            replica.route = engine_pb2.ROUTE_STATE_OUT
            replica.lend_id = ""
            replica.confirmed_free = replica.spec.replica_id not in self.stubborn
        await self.wake()
        if self.stubborn:
            raise partial(operation_id, *sorted(self.stubborn))

    async def WatchReplicas(
        self, request: engine_pb2.WatchReplicasRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchReplicasResponse]:
        await self.script.enter("WatchReplicas")
        known: dict[str, bytes] = {}
        first, told = True, ""
        while True:
            seen = self._changes.number
            now = {replica_id: r.SerializeToString(deterministic=True) for replica_id, r in self.replicas.items()}
            changed = [self.replicas[r] for r, content in now.items() if known.get(r) != content]
            removed = [r for r in known if r not in now]
            if first or changed or removed or told != self.incarnation:
                first, known, told = False, now, self.incarnation
                yield engine_pb2.WatchReplicasResponse(changed=changed, removed=removed, incarnation=self.incarnation)
            await self._changes.since(seen)

    async def GetProgress(
        self, request: engine_pb2.GetProgressRequest, context: Context
    ) -> engine_pb2.GetProgressResponse:
        await self.script.enter("GetProgress")
        return engine_pb2.GetProgressResponse(report=self.present)

    async def WatchProgress(
        self, request: engine_pb2.WatchProgressRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchProgressResponse]:
        await self.script.enter("WatchProgress")
        sent = 0
        while True:
            seen = self._changes.number
            while sent < len(self.progress):
                yield engine_pb2.WatchProgressResponse(report=self.progress[sent])
                sent += 1
            await self._changes.since(seen)


def partial(operation_id: str, *replica_ids: str) -> TurnoutError:
    """What a controller answers when some replicas did not do it."""
    from services.runtime.errors import Code

    failures = {f"failure.{n}": f"{replica_id}: TIMED_OUT" for n, replica_id in enumerate(replica_ids)}
    metadata = {"operation_id": operation_id, "failed": len(replica_ids), **failures}
    return TurnoutError(Code.DEADLINE_EXCEEDED, "PARTIAL", f"{len(replica_ids)} replicas did not", metadata)


class _Hosted(HostedService):
    def __init__(self, full_name: str, add: Callable[[grpc.aio.Server], None]) -> None:
        self.full_names = (full_name,)
        self._add = add

    def register(self, server: grpc.aio.Server) -> None:
        self._add(server)


def host_buffer(fake: FakeBuffer, listen: str = "127.0.0.1:0") -> ServiceHost:
    """A host for a fake buffer."""

    def build(context: HostContext) -> HostedService:
        return _Hosted(
            "turnout.buffer.v1.ReplayBuffer",
            lambda server: buffer_pb2_grpc.add_ReplayBufferServicer_to_server(fake, server),
        )

    return ServiceHost("buffer", ServiceSettings(listen=[listen], grace_s=0.02), build)


def host_engine(fake: FakeEngine, listen: str = "127.0.0.1:0") -> ServiceHost:
    """A host for a fake engine controller."""

    def build(context: HostContext) -> HostedService:
        return _Hosted(
            "turnout.engine.v1.EngineController",
            lambda server: engine_pb2_grpc.add_EngineControllerServicer_to_server(fake, server),
        )

    return ServiceHost("engine", ServiceSettings(listen=[listen], grace_s=0.02), build)
