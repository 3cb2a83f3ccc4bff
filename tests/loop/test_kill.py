"""kill -9 of a scheduler process in the middle of moving GPUs: real services, a trainer that only calls its hooks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.loop.test_faults import Stack, finish, run_of, stack, train
from tests.loop.test_loop import RUN, SCALE, prompts
from turnout.buffer.v1 import buffer_pb2
from turnout.client import ClientOptions
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, resume_from

ROOT = Path(__file__).parents[2]
START_S = 30.0
T = TypeVar("T")


class SchedulerProcess:
    """`turnout scheduler serve` on one address and one directory, over several lives."""

    def __init__(self, data_dir: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.target = f"127.0.0.1:{free.getsockname()[1]}"
        self._data_dir = data_dir
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.cli.main", "scheduler", "serve"),
            *("--listen", self.target, "--data-dir", str(self._data_dir), "--time-scale", str(SCALE), "--grace-s", "1"),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), START_S)).decode()
        assert re.search(r"listening on (\S+)", line), line

    async def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(how)
        return await asyncio.wait_for(self.process.wait(), START_S)


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[tuple[Stack, SchedulerProcess]]:
    scheduler = SchedulerProcess(tmp_path / "scheduler")
    await scheduler.start()
    try:
        async with stack(tmp_path / "buffer", scheduler_target=scheduler.target, options=ClientOptions()) as s:
            s.setup.config.engine_timeout.FromSeconds(20)
            yield s, scheduler
    finally:
        await scheduler.end()


async def replicas(hooks: AsyncTrainerHooks) -> list[engine_pb2.Replica]:
    answer = await hooks.engine.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN))
    return [replica for replica in answer.replicas if replica.spec.role == engine_pb2.REPLICA_ROLE_HYBRID]


async def killed_within(
    s: Stack,
    scheduler: SchedulerProcess,
    hooks: AsyncTrainerHooks,
    call: Callable[[], Awaitable[T]],
    route: engine_pb2.RouteState.ValueType,
    how: signal.Signals = signal.SIGKILL,
) -> T:
    """What `call` returns, its scheduler having ended once hybrid-0 was at `route` and hybrid-1 hung."""
    await s.fault(hooks, "fault_hang")
    calling = asyncio.ensure_future(call())
    while next(r.route for r in await replicas(hooks) if r.spec.replica_id == "hybrid-0") != route:
        await asyncio.sleep(0.02)
        assert not calling.done(), await calling
    assert await scheduler.end(how) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    await s.fault(hooks, "fault_heal")
    await scheduler.start()
    return await asyncio.wait_for(calling, START_S)


async def events_of(hooks: AsyncTrainerHooks) -> list[events_pb2.RunEvent]:
    request = scheduler_pb2.WatchRunRequest(run_id=RUN, from_sequence=1, no_follow=True)
    return [event async for batch in hooks.scheduler.calls.WatchRun(request) for event in batch.events]


async def test_h57_kill_9_in_the_middle_of_a_reclaim_and_of_a_lend(tmp_path: Path) -> None:
    """The trainer is inside one hook call each time, and does nothing but wait for its end."""
    async with world(tmp_path) as (s, scheduler):
        hooks = await s.hooks()
        await hooks.on_train_begin(prompts(0, 24))
        await finish(hooks, 8)
        began = lambda: hooks.on_step_begin(1)  # noqa: E731
        mode = await killed_within(s, scheduler, hooks, began, engine_pb2.ROUTE_STATE_OUT)
        assert mode == events_pb2.MODE_TRAINER
        assert all(replica.confirmed_free for replica in await replicas(hooks))
        trained: list[str] = []

        async def first_step() -> None:
            trained.extend(await train(hooks, 1))

        await killed_within(s, scheduler, hooks, first_step, engine_pb2.ROUTE_STATE_HELD)
        assert (await run_of(hooks)).mode == events_pb2.MODE_ROLLOUT
        assert all(replica.route == engine_pb2.ROUTE_STATE_SERVING for replica in await replicas(hooks))
        await finish(hooks, 8)
        assert await hooks.on_step_begin(2) == events_pb2.MODE_TRAINER
        trained += await train(hooks, 2)
        assert len(trained) == len(set(trained)) == 16

        run = await run_of(hooks)
        events = await events_of(hooks)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        kinds = Counter(event.WhichOneof("event") for event in events)
        # The lend of the start, those of both steps; each was taken back but the last.
        assert (run.lends, run.reclaims) == (3, 2)
        assert (kinds["lend_done"], kinds["reclaim_done"], kinds["lend_abandoned"]) == (3, 2, 0)
        assert kinds["step_began"] == kinds["step_ended"] == 2
        added = [name for event in events for name in event.groups_added.group_ids]
        assert len(added) == len(set(added)) == 24
        ledger = await hooks.buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition="train"))
        assert ledger.committed == 16
        await hooks.close(reason="finished")


@pytest.mark.slow
async def test_h50_sigterm_in_the_middle_of_a_reclaim_is_joined_by_the_next_scheduler(tmp_path: Path) -> None:
    """An operator restarts the scheduler for a new version while engines are slow to let go."""
    async with world(tmp_path) as (s, scheduler):
        hooks = await s.hooks()
        await hooks.on_train_begin(prompts(0, 16))
        await finish(hooks, 8)
        began = lambda: hooks.on_step_begin(1)  # noqa: E731
        mode = await killed_within(s, scheduler, hooks, began, engine_pb2.ROUTE_STATE_OUT, signal.SIGTERM)
        assert mode == events_pb2.MODE_TRAINER
        assert len(await train(hooks, 1)) == 8
        kinds = Counter(event.WhichOneof("event") for event in await events_of(hooks))
        assert (kinds["reclaim_done"], kinds["step_began"], kinds["run_opened"]) == (1, 1, 1)
        await hooks.close(reason="finished")


@pytest.mark.slow
async def test_a_trainer_that_died_with_its_scheduler_resumes_where_it_stood(tmp_path: Path) -> None:
    """A machine is lost, and with it trainer and scheduler: the steps agree, so nobody need say keep_live."""
    async with world(tmp_path) as (s, scheduler):
        first = await s.hooks()
        await first.on_train_begin(prompts(0, 32))
        await finish(first, 16)
        await first.on_step_begin(1)
        trained = await train(first, 1)
        manifest = await first.save(1)
        assert (await run_of(first)).mode == events_pb2.MODE_TRAINER
        await scheduler.end()
        await first.close()
        await scheduler.start()
        second = await s.hooks(resume=scheduler_pb2.Resume(resume_step=1), take_over=True)
        assert (second.epoch, second.next_step) == (first.epoch + 1, 2)
        await second.on_step_begin(2)
        lost = await train(second, 2)
        assert not set(trained) & set(lost)
        await scheduler.end()
        await second.close()
        await scheduler.start()
        third = await s.hooks(resume=resume_from(manifest, 1), take_over=True)
        assert (third.epoch, third.next_step) == (second.epoch + 1, 2)
        await third.on_step_begin(2)
        assert await train(third, 2) == lost, "the checkpoint of a scheduler that was killed twice since"
        await third.close(reason="finished")
