"""Three runs of one scheduler under every sequence of calls, with crashes, restarts and stubborn engines as moves.

A crash is the data directory as it is at that moment, which is what kill -9 leaves; a new scheduler starts on a copy,
also while a call to an engine is on its way. The model keeps what trainers were answered in plain fields.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.runtime.host import ServiceHost
from services.runtime.statuses import from_rpc_error
from services.scheduler.service import SchedulerService, build
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.fakes import FakeBuffer, FakeEngine, host_buffer, host_engine
from tests.scheduler.world import Trainer, run_config
from turnout.scheduler.v1 import events_pb2, scheduler_pb2_grpc
from turnout.scheduler.v1 import scheduler_pb2 as pb

T = TypeVar("T")

RUNS = {"a": ("g0", "g1"), "b": ("g1", "g2"), "c": ("g3",)}
"""The GPUs of the hybrids of each run: a and b cannot be open together."""

MINI_BATCHES = 2
REFUSALS = {"RECLAIM_FAILED", "LEND_FAILED", "ABORT_LEND_FAILED"}
"""What engines that do not let go may lead to."""


@dataclass
class Job:
    """One trainer, and what it was answered."""

    run_id: str
    engine: FakeEngine
    epoch: int = 0
    open: bool = False
    fenced: bool = False
    step: int = 0
    stage: str = "between"
    mini_batch: int = 0
    attempt: int = 0
    lend: pb.Lend | None = None
    lends: set[str] = field(default_factory=set)
    known: bool = False

    def begin(self, answer: pb.OpenRunResponse) -> None:
        """A trainer was let in."""
        self.epoch, self.open, self.fenced, self.known = answer.epoch, True, False, True
        self.stage, self.mini_batch, self.attempt = "between", 0, 0
        self.lent(answer)

    def lent(self, answer: Any) -> None:
        """The answer may hold a lend."""
        self.lend = answer.lend if answer.HasField("lend") else None
        if self.lend is not None:
            assert self.lend.lend_id not in self.lends, "a lend was given out twice"
            self.lends.add(self.lend.lend_id)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are calls and accidents."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(mkdtemp())
        self.lives = 0
        self.stack = AsyncExitStack()
        self.run(self._begin())
        for run_id in ("a", "c"):
            self._open(self.jobs[run_id], resumes=False)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    # ------------------------------------------------------------------------------------------------------ the house

    @property
    def directory(self) -> Path:
        return self.root / f"life-{self.lives}"

    async def _begin(self) -> None:
        self.buffer = FakeBuffer([])  # type: ignore[abstract]
        self.jobs: dict[str, Job] = {}
        self.targets: dict[str, str] = {}
        self.buffer_target = (await self.stack.enter_async_context(host_buffer(self.buffer))).target
        for run_id, gpus in RUNS.items():
            self.buffer.add_run(run_id)
            engine = FakeEngine([], run_id)  # type: ignore[abstract]
            for gpu in gpus:
                engine.add(f"{run_id}-{gpu}", gpu=gpu)
            self.jobs[run_id] = Job(run_id, engine)
            self.targets[run_id] = (await self.stack.enter_async_context(host_engine(engine))).target
        await self._start()

    async def _start(self) -> None:
        chosen = SchedulerSettings(
            listen=["127.0.0.1:0"],
            data_dir=self.directory,
            transition_attempts=1,
            transition_backoff_s=0.0,
            reclaim_patience_s=0.0,
            peer_backoff_s=0.01,
            watch_progress=False,
        )
        self.host: ServiceHost = build(chosen)
        await self.host.start()
        self.channel = grpc.aio.insecure_channel(self.host.target, options=[("grpc.enable_http_proxy", 0)])
        self.stub: scheduler_pb2_grpc.SwitchSchedulerAsyncStub = scheduler_pb2_grpc.SwitchSchedulerStub(self.channel)
        self.stack.push_async_callback(self._stop, self.host, self.channel)

    @staticmethod
    async def _stop(host: ServiceHost, channel: grpc.aio.Channel) -> None:
        await channel.close()
        await host.stop(0)

    async def _crash(self) -> None:
        before, host, channel = self.directory, self.host, self.channel
        self.lives += 1
        shutil.copytree(before, self.directory)
        await self._stop(host, channel)
        await self._start()

    async def _restart(self) -> None:
        before, host, channel = self.directory, self.host, self.channel
        await self._stop(host, channel)
        self.lives += 1
        shutil.copytree(before, self.directory)
        await self._start()

    async def _call(self, job: Job, make: Callable[[], Awaitable[T]], crash_at: str) -> T:
        """What `make` is answered; the scheduler crashes when it calls the engine's `crash_at`, if it does."""
        script = job.engine.script
        if crash_at:
            gate = script.gates[crash_at] = asyncio.Event()
            script.arrived[crash_at].clear()
            first = asyncio.ensure_future(make())
            arriving = asyncio.ensure_future(script.arrived[crash_at].wait())
            await asyncio.wait((first, arriving), return_when=asyncio.FIRST_COMPLETED)
            arriving.cancel()
            if not first.done():
                await self._crash()
            del script.gates[crash_at]
            gate.set()
            await asyncio.gather(first, return_exceptions=True)
        return await make()

    def _trainer(self, job: Job) -> Trainer:
        return Trainer(self.stub, job.epoch, job.run_id)

    # ------------------------------------------------------------------------------------------------------- accidents

    @rule()
    def crash(self) -> None:
        self.run(self._crash())

    @rule()
    def restart(self) -> None:
        self.run(self._restart())

    @rule()
    def snapshot(self) -> None:
        service = self.host.service
        assert isinstance(service, SchedulerService)
        assert service.keeper is not None
        self.run(service.keeper.snapshot())

    @rule(run_id=st.sampled_from(sorted(RUNS)), free=st.booleans())
    def restart_engine(self, run_id: str, free: bool) -> None:
        engine = self.jobs[run_id].engine
        incarnation = f"e{len(engine.moves)}-{int(engine.incarnation[1:].split('-')[0]) + 1}"
        self.run(engine.restart(incarnation, free=free and engine.all_free))

    @rule(run_id=st.sampled_from(sorted(RUNS)), stubborn=st.booleans())
    def be_stubborn(self, run_id: str, stubborn: bool) -> None:
        engine = self.jobs[run_id].engine
        engine.stubborn = {engine.hybrids()[0].spec.replica_id} if stubborn else set()

    # ----------------------------------------------------------------------------------------------------------- calls

    @rule(sampleable=st.sampled_from([0, 3, 4, 8]))
    def fill(self, sampleable: int) -> None:
        self.run(self.buffer.set_depth(sampleable))

    @rule(run_id=st.sampled_from(sorted(RUNS)), resumes=st.booleans())
    def open(self, run_id: str, resumes: bool) -> None:
        self._open(self.jobs[run_id], resumes=resumes)

    def _open(self, job: Job, *, resumes: bool) -> None:
        run_id = job.run_id
        held = [other for other in self.jobs.values() if other.open and other is not job]
        taken = any(set(RUNS[run_id]) & set(RUNS[other.run_id]) for other in held)
        resume = pb.Resume(resume_step=job.step, keep_live=True) if job.known or resumes else None
        request = pb.OpenRunRequest(
            run_id=run_id,
            config=run_config(
                train_batch_size=8,
                parameter_sync_step=MINI_BATCHES,
                total_training_steps=1000,
                hybrid_gpus=len(RUNS[run_id]),
            ),
            buffer_target=self.buffer_target,
            engine_target=self.targets[run_id],
            resume=resume,
            take_over=True,
        )

        async def opening() -> pb.OpenRunResponse:
            return await self.stub.OpenRun(request)

        try:
            answer = self.run(opening())
        except grpc.aio.AioRpcError as error:
            reason = from_rpc_error(error).reason
            if reason != ("GPU_HELD" if taken else "RECLAIM_FAILED"):
                raise
            job.fenced = job.fenced or (job.open and reason == "RECLAIM_FAILED")
            return
        assert not taken, "two open runs hold one GPU"
        assert answer.epoch > job.epoch
        job.begin(answer)

    @rule(run_id=st.sampled_from(sorted(RUNS)))
    def close(self, run_id: str) -> None:
        job = self.jobs[run_id]
        if not job.open or job.fenced:
            return

        async def closing() -> None:
            await self.stub.CloseRun(pb.CloseRunRequest(run_id=run_id, epoch=job.epoch, reason="enough"))

        try:
            self.run(closing())
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason not in REFUSALS or not job.engine.stubborn:
                raise
            job.fenced = True
            return
        assert job.engine.all_free
        job.open = False

    @precondition(lambda self: self.at_work())
    @rule(
        data=st.data(),
        calls=st.integers(1, 6),
        crash_at=st.sampled_from(["", "BeginLend", "FinishLend", "Reclaim", "AbortLend", "ListReplicas"]),
        abandons=st.booleans(),
    )
    def train_and_crash(self, data: st.DataObject, calls: int, crash_at: str, abandons: bool) -> None:
        """The next calls of a trainer, the scheduler crashing in each that asks this of its engines."""
        self._train(self.jobs[data.draw(st.sampled_from(self.at_work()))], calls, crash_at, abandons)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), calls=st.integers(4, 12))
    def train(self, data: st.DataObject, calls: int) -> None:
        """The next calls of a trainer."""
        self._train(self.jobs[data.draw(st.sampled_from(self.at_work()))], calls, "", False)

    def at_work(self) -> list[str]:
        """The runs whose trainers may call."""
        return [run_id for run_id, job in self.jobs.items() if job.open and not job.fenced]

    def _train(self, job: Job, calls: int, crash_at: str, abandons: bool) -> None:
        for _ in range(calls):
            try:
                self.run(self._next(job, crash_at, abandons))
            except grpc.aio.AioRpcError as error:
                if from_rpc_error(error).reason not in REFUSALS or not job.engine.stubborn:
                    raise
                return

    async def _next(self, job: Job, crash_at: str, abandons: bool) -> None:
        step = job.step
        if job.lend is not None:
            lend = job.lend
            if abandons:
                await self._call(job, lambda: self._trainer(job).abandon(lend), crash_at)
            else:
                await self._call(job, lambda: self._trainer(job).complete(lend), crash_at)
            job.lend = None
        elif job.stage == "between":
            began = await self._call(job, lambda: self._trainer(job).begin(step + 1), crash_at)
            self._may_train(job, began.mode)
            job.step, job.stage, job.mini_batch, job.attempt = step + 1, "begun", 0, 0
        elif job.stage == "begun":
            attempt = job.attempt
            done = await self._call(job, lambda: self._trainer(job).prepare(step, attempt, max_wait=0.0), crash_at)
            if done.mode == events_pb2.MODE_TRAINER:
                self._may_train(job, done.mode)
                job.stage, job.attempt = "prepared", 0
            else:
                job.attempt += 1
        elif job.stage == "sampling":
            await self._call(job, lambda: self._trainer(job).end_sample(step, job.mini_batch, wait=3.0), crash_at)
            job.stage, job.mini_batch = "prepared", job.mini_batch + 1
        elif job.mini_batch < MINI_BATCHES:
            await self._call(job, lambda: self._trainer(job).begin_sample(step, job.mini_batch), crash_at)
            job.stage = "sampling"
        else:
            ended = await self._call(job, lambda: self._trainer(job).end(step), crash_at)
            job.stage = "between"
            job.lent(ended)

    def _may_train(self, job: Job, mode: int) -> None:
        assert mode != events_pb2.MODE_TRAINER or job.engine.all_free, "a trainer was let loose on used memory"

    # ------------------------------------------------------------------------------------------------------ invariants

    @invariant()
    def runs_are_what_their_trainers_were_told(self) -> None:
        async def reading() -> dict[str, pb.Run]:
            return {run.run_id: run for run in (await self.stub.ListRuns(pb.ListRunsRequest())).runs}

        runs = self.run(reading())
        for job in self.jobs.values():
            if not job.known:
                continue
            run = runs[job.run_id]
            assert run.open == job.open
            if job.open and not job.fenced:
                assert (run.epoch, run.step) == (job.epoch, job.step)
                assert run.lend.lend_id == (job.lend.lend_id if job.lend is not None else "")

    @invariant()
    def no_gpu_has_two_owners(self) -> None:
        service = self.host.service
        assert isinstance(service, SchedulerService)
        hosted = service.registry.all()
        if not hosted:
            return
        holdings = hosted[0].tools.holdings
        held = {run_id: {gpu.uuid for gpu in holdings.of(run_id)} for run_id in RUNS}
        for job in self.jobs.values():
            if job.known and job.open:
                assert held[job.run_id] == set(RUNS[job.run_id])
            elif job.known:
                assert held[job.run_id] == set()

    @invariant()
    def lends_follow_each_other(self) -> None:
        """An engine is never asked to begin a lend while another is open, nor to finish one that is not."""
        for job in self.jobs.values():
            open_lend = ""
            for call, lend_id in job.engine.moves:
                if call == "BeginLend":
                    assert open_lend in ("", lend_id), f"lend {lend_id} began while {open_lend} was open"
                    open_lend = lend_id
                elif call == "FinishLend":
                    assert open_lend == lend_id
                else:
                    open_lend = ""


class LongSchedulerMachine(SchedulerMachine):
    """The same, for longer."""


SchedulerMachine.TestCase.settings = settings(max_examples=4, stateful_step_count=15, deadline=None)
TestScheduler = SchedulerMachine.TestCase
LongSchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchedulerForLong = pytest.mark.slow(pytest.mark.timeout(1200)(LongSchedulerMachine.TestCase))
