"""What the trainers and workers of three runs do, and what they were told, over the house's services.

Memory is what is watched most: a GPU on which a trainer was told to train must have no engine awake on it, from that
answer until the trainer gives the GPU away again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio

from services.runtime.errors import Code, TurnoutError
from services.runtime.statuses import from_rpc_error
from tests.loop.groups import Groups
from tests.loop.house import REPLICA_S, Cell, House
from tests.loop.installing import install
from tests.loop.jobs import BATCH, MINI, MINI_BATCHES, PASSING, POLICIES, RUNS, Job, Refused
from tests.scheduler.world import run_config, wall
from turnout.buffer.v1 import buffer_pb2 as bpb
from turnout.buffer.v1 import buffer_pb2_grpc
from turnout.engine.v1 import engine_pb2 as epb
from turnout.engine.v1 import engine_pb2_grpc
from turnout.scheduler.v1 import events_pb2, scheduler_pb2_grpc
from turnout.scheduler.v1 import scheduler_pb2 as pb

T = TypeVar("T")


class Model:
    """Three jobs, and the stubs through which they speak."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.jobs = {run_id: Job(run_id) for run_id in RUNS}

    async def begin(self) -> None:
        """The runs exist; two of them have a trainer."""
        house = self.house
        self.scheduler: scheduler_pb2_grpc.SwitchSchedulerAsyncStub = scheduler_pb2_grpc.SwitchSchedulerStub(
            await house.channel(house.scheduler.target)
        )
        self.buffer: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(
            await house.channel(house.buffer.target)
        )
        self.groups = Groups(house, self.buffer, self.asked)
        self.engines: dict[str, engine_pb2_grpc.EngineControllerAsyncStub] = {}
        for run_id, engine in house.engines.items():
            self.engines[run_id] = engine_pb2_grpc.EngineControllerStub(await house.channel(engine.target))
            await self.buffer.CreateRun(
                bpb.CreateRunRequest(run_id=run_id, config=bpb.RunConfig(train_batch_size=BATCH))
            )
        for run_id in ("a", "c"):
            await self._open(self.jobs[run_id], None)

    # ------------------------------------------------------------------------------------------------------- the world

    async def asked(self, call: Awaitable[T]) -> T:
        """What a call is answered. Raises Refused if it may be repeated later."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            said = from_rpc_error(error)
            if said.reason in PASSING or said.code is Code.UNAVAILABLE:
                raise Refused(said.reason) from error
            raise

    async def reason(self, call: Awaitable[object]) -> str:
        """Why a call is refused; empty if it is not."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return ""

    def _may_train(self, job: Job) -> None:
        """The trainer was told that its GPUs are its own."""
        self.house.room.trained |= dict.fromkeys(job.gpus, job.run_id)

    def _gives_away(self, job: Job) -> None:
        """The trainer is not on its GPUs any more."""
        for gpu in job.gpus:
            if self.house.room.trained.get(gpu) == job.run_id:
                del self.house.room.trained[gpu]

    def trains(self, job: Job) -> bool:
        return all(self.house.room.trained.get(gpu) == job.run_id for gpu in job.gpus)

    async def two_owners(self, strays_of: Job | None = None) -> list[str]:
        """Engines with memory on a GPU on which a trainer was told to train, and GPUs with two engines.

        Those that a supervisor started meanwhile count if they are of the run `strays_of`.
        """
        room, found, users = self.house.room, [], set()
        for cell in room.cells.values():
            counts = not cell.stray or (strays_of is not None and cell in room.of(strays_of.run_id))
            if counts and await cell.awake():
                for gpu in cell.spec.gpus:
                    if (gpu.node, gpu.uuid) in room.trained or gpu in users:
                        found.append(f"{cell.spec.replica_id} is awake on {gpu.uuid}, which has an owner")
                    users.add(gpu)
        return found

    async def start_engine(self, cell: Cell) -> None:
        cell.start()
        if any((gpu.node, gpu.uuid) in self.house.room.trained for gpu in cell.spec.gpus):
            await cell.free()

    async def heal(self, cell: Cell) -> None:
        """An engine is well again; one of a job that ended stays away."""
        cell.heal()
        await cell.quiet()
        if cell.dead and self.jobs[cell.spec.replica_id.partition("-")[0]].open:
            await self.start_engine(cell)

    # -------------------------------------------------------------------------------------------------------- openings

    async def _open(self, job: Job, resume: pb.Resume | None) -> None:
        """A trainer begins, or takes the place of the one that was there."""
        self._gives_away(job)
        job.alive = False
        taken = [other for other in self.jobs.values() if other.open and set(other.gpus) & set(job.gpus)]
        taken = [other for other in taken if other is not job]
        config = run_config(
            policy=POLICIES[job.run_id],
            train_batch_size=BATCH,
            parameter_sync_step=MINI_BATCHES,
            mini_batch_size=MINI,
            total_training_steps=1000,
            hybrid_gpus=len(job.gpus),
            engine_timeout=wall(REPLICA_S),
            hybrid_devices=[epb.Gpu(node=node, uuid=uuid) for node, uuid in job.gpus],
        )
        request = pb.OpenRunRequest(
            run_id=job.run_id,
            config=config,
            buffer_target=self.house.buffer.target,
            engine_target=self.house.engines[job.run_id].target,
            resume=resume,
            take_over=True,
        )
        if taken:
            reason = await self.reason(self.scheduler.OpenRun(request))
            assert reason == "GPU_HELD" or reason in PASSING
            return
        answer = await self.asked(self.scheduler.OpenRun(request))
        assert answer.epoch > job.epoch
        assert answer.next_step == (1 if resume is None else resume.resume_step + 1)
        job.epoch, job.step, job.stage, job.attempt, job.validated = answer.epoch, answer.next_step - 1, "between", 0, 0
        job.alive, job.calls, job.pending, job.update_id = True, [], False, ""
        if resume is not None and resume.checkpoint_id:
            _, added, committed = job.saves[resume.checkpoint_id]
            job.added, job.committed, job.claimed = list(added), list(committed), []
        await self._ready(job)
        job.known = job.open = True
        self._lent(job, answer)

    async def _ready(self, job: Job) -> None:
        """The engines of a job that begins are started and registered."""
        if job.open:
            return
        for cell in self.house.room.of(job.run_id):
            await self.start_engine(cell)
        stub = self.engines[job.run_id]
        for uuid, role in [*((uuid, "HYBRID") for uuid in RUNS[job.run_id]), ("s", "STANDALONE")]:
            name, hybrid = f"{job.run_id}-{uuid}", role == "HYBRID"
            spec = epb.ReplicaSpec(
                replica_id=name,
                role=epb.ReplicaRole.Value(f"REPLICA_ROLE_{role}"),
                backend="reference",
                gpus=[epb.Gpu(node="n0", uuid=uuid if hybrid else name)],
                weights=epb.WEIGHTS_ORIGIN_NONE if hybrid else epb.WEIGHTS_ORIGIN_LOADED,
            )
            await self.asked(stub.Register(epb.RegisterRequest(run_id=job.run_id, spec=spec)))

    def _lent(self, job: Job, answer: Any) -> None:
        job.installed = job.abandons = False
        job.lend = answer.lend if answer.HasField("lend") else None
        if job.lend is not None:
            assert job.lend.lend_id not in job.lends, "a lend was given out twice"
            job.lends[job.lend.lend_id] = job.epoch

    async def resume(self, job: Job, older: bool) -> None:
        if not self.house.engines[job.run_id].running:
            return
        resume = pb.Resume(resume_step=job.step, keep_live=True) if job.known else None
        if older and job.saves:
            checkpoint_id, (step, _, _) = next(iter(job.saves.items()))
            resume = pb.Resume(resume_step=step, checkpoint_id=checkpoint_id)
        try:
            await self._open(job, resume)
        except Refused:
            return

    async def close(self, job: Job) -> None:
        if not job.alive:
            return
        try:
            request = pb.CloseRunRequest(run_id=job.run_id, epoch=job.epoch, reason="enough")
            await self.asked(self.scheduler.CloseRun(request))
        except Refused:
            # Its engines are not confirmed free: it holds its GPUs, and only a successor goes on with it.
            job.alive, job.lend = False, None
            return
        self._gives_away(job)
        job.alive = job.open = False
        job.lend = None
        for cell in self.house.room.of(job.run_id):
            if not cell.dead:
                hybrid = cell.spec.replica_id != f"{job.run_id}-s"
                assert not (hybrid and await cell.awake()), "a run was closed over an engine that is awake"
                await cell.die()

    async def train(self, job: Job, calls: int, **ways: bool) -> None:
        for _ in range(calls):
            if not job.alive:
                return
            try:
                await self._next(job, **ways)
            except Refused:
                return

    async def _next(self, job: Job, *, abandons: bool = False, validates: bool = False, saves: bool = False) -> None:
        """The next call of the trainer, by what it was answered last."""
        step, who, cut = job.step, job.who, job.pending
        if job.lend is not None:
            await self._close_lend(job, abandons)
        elif job.stage == "validating":
            await self._call(job, "EndValidation", pb.EndValidationRequest(step=step, **who))
            job.stage = "between"
        elif job.stage == "between" and saves and not cut and len(job.saves) < 3:
            saved = await self._call(job, "Save", pb.SaveRequest(step=step, **who))
            # A repeat gets the first answer: the checkpoint is that of the first.
            job.saves.setdefault(saved.checkpoint_id, (step, list(job.added), list(job.committed)))
        elif job.stage == "between" and validates and step > job.validated:
            trained = self.trains(job)
            self._gives_away(job)
            began = await self._call(job, "BeginValidation", pb.BeginValidationRequest(step=step, **who))
            job.stage, job.validated = "validating", step
            self._lent(job, began)
            if trained and not began.HasField("lend"):
                self._may_train(job)
        elif job.stage == "between":
            began = await self._call(job, "BeginStep", pb.BeginStepRequest(step=step + 1, **who))
            job.step, job.stage, job.mini_batch, job.attempt = step + 1, "begun", 0, 0
            await self._told(job, began.mode, cut)
        elif job.stage == "begun":
            request = pb.PrepareStepRequest(step=step, attempt=job.attempt, max_wait=wall(0), **who)
            done = await self._call(job, "PrepareStep", request)
            if done.mode == events_pb2.MODE_TRAINER:
                await self._told(job, done.mode, cut)
                job.stage, job.attempt = "prepared", 0
            else:
                assert done.outcome in (bpb.WAIT_OUTCOME_TIMED_OUT, bpb.WAIT_OUTCOME_HELD)
                job.attempt += 1
        elif job.stage == "sampling":
            waited = pb.EndSampleRequest(step=step, mini_batch=job.mini_batch, wait=wall(7.0), **who)
            await self._call(job, "EndSample", waited)
            job.stage, job.mini_batch = "prepared", job.mini_batch + 1
        elif job.mini_batch < MINI_BATCHES:
            sample = pb.BeginSampleRequest(step=step, mini_batch=job.mini_batch, **who)
            done = await self._call(job, "BeginSample", sample)
            assert done.WhichOneof("answer") == "proceed"
            job.stage = "sampling"
            await self.groups.sample(job)
        else:
            self._gives_away(job)
            ended = await self._call(job, "EndStep", pb.EndStepRequest(step=step, **who))
            job.stage = "between"
            self._lent(job, ended)
            if not ended.HasField("lend") and not ended.lend_failure:
                self._may_train(job)

    async def _call(self, job: Job, name: str, request: Any) -> Any:
        job.pending = True
        answer = await self.asked(self.send(name, request))
        job.pending = False
        job.calls.append((name, request, answer))
        return answer

    async def send(self, name: str, request: Any) -> Any:
        call = getattr(self.scheduler, name)(request)
        if name not in ("PrepareStep", "BeginSample"):
            return await call
        told = [event async for event in call]
        return told[-1].done

    async def _told(self, job: Job, mode: int, cut: bool) -> None:
        """The trainer was told who has its GPUs; if its call was cut before, perhaps as it was then."""
        if mode == events_pb2.MODE_TRAINER:
            self._may_train(job)
            found = await self.two_owners(None if cut else job)
            assert not found, f"{job.run_id} was told to train: {found}"

    async def _close_lend(self, job: Job, abandons: bool) -> None:
        assert job.lend is not None
        lend_id, who = job.lend.lend_id, job.who
        # What was cut half-way is said again: the controller may have closed the lend already.
        abandons = (abandons or job.abandons) and job.lend.kind != events_pb2.LEND_KIND_INIT
        if not abandons and not job.installed:
            try:
                await install(self.engines[job.run_id], job, job.lend)
                job.installed = True
            except TurnoutError:
                # Its weights do not arrive: a lend that cannot be completed is given up, but for that of the start.
                abandons = job.lend.kind != events_pb2.LEND_KIND_INIT
        cut = job.pending
        try:
            if abandons:
                job.abandons = True
                request = pb.AbandonLendRequest(lend_id=lend_id, reason="broken", **who)
                await self._call(job, "AbandonLend", request)
            else:
                await self._call(
                    job, "CompleteLend", pb.CompleteLendRequest(lend_id=lend_id, hybrid_update=wall(3.0), **who)
                )
        except Refused:
            job.installed = False
            raise
        except grpc.aio.AioRpcError as error:
            # The other one of the two was cut before, and the scheduler has gone on with it by itself.
            if not cut or from_rpc_error(error).reason != "LEND_CLOSED":
                raise
            job.pending = False
        job.lend = None

    # ------------------------------------------------------------------------------------------------------ invariants

    async def check(self) -> None:
        """What holds at every moment."""
        for cell in self.house.room.cells.values():
            await cell.quiet()
        await self._strays_freed()
        found = [*self.house.room.faults, *await self.two_owners()]
        assert not found, found
        if self.house.scheduler.running:
            await self._check_runs()
        if self.house.buffer.running:
            await self.groups.check(self.jobs.values())

    async def _strays_freed(self) -> None:
        """A controller that is there frees the engines that were started over its trainer's head."""
        for job in self.jobs.values():
            for cell in self.house.room.of(job.run_id):
                gpus = {(gpu.node, gpu.uuid) for gpu in cell.spec.gpus}
                if not gpus & self.house.room.trained.keys() or not self.house.engines[job.run_id].running:
                    continue
                async with asyncio.timeout(20):
                    while cell.stray and cell.well:  # noqa: ASYNC110 - an engine tells nobody
                        await asyncio.sleep(0.01)

    async def _check_runs(self) -> None:
        """Runs are what their trainers were told."""
        # The channel may not have found a service that came back again yet.
        listed = (await self.asked(self.scheduler.ListRuns(pb.ListRunsRequest(), wait_for_ready=True))).runs
        runs = {run.run_id: run for run in listed}
        assert "stranger" not in runs
        for job in self.jobs.values():
            if not job.alive:
                continue
            run = runs[job.run_id]
            assert run.open
            assert run.epoch == job.epoch
            if run.mode == events_pb2.MODE_ROLLOUT:
                assert not self.trains(job), "the trainer was not told that its GPUs are lent"
            if not job.pending:
                assert run.step == job.step
                assert run.lend.lend_id == (job.lend.lend_id if job.lend is not None else "")

    # -------------------------------------------------------------------------------------------------------- recovery

    async def recover(self) -> None:
        """Whatever happened: with all services and engines back, every trainer gets through another step."""
        house = self.house
        for resident in house.residents:
            if not resident.running:
                await resident.start()
        for cell in house.room.cells.values():
            await self.heal(cell)
        for job in self.jobs.values():
            if not job.open:
                continue
            async with asyncio.timeout(60):
                while not job.alive:
                    await self.resume(job, False)
                goal = job.step + 2
                while job.step < goal or not self.trains(job):
                    await self.groups.supply(job)
                    await self.train(job, 1)
        found = await self.two_owners()
        assert not found, found
