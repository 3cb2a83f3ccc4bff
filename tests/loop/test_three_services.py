"""Three runs over all three services under random moves of trainers and workers, crashes, faults and jumps of time.

Each number is one sequence of moves, always the same; a failure names the moves that led to it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.loop.house import Gate, House, Resident
from tests.loop.jobs import RUNS, Job, Refused
from tests.loop.model import Model
from tests.scheduler.world import run_config
from turnout.buffer.v1 import buffer_pb2 as bpb
from turnout.engine.v1 import engine_pb2 as epb
from turnout.scheduler.v1 import scheduler_pb2 as pb

COMMANDS = ("sleep", "wake_up", "pause", "reset_caches", "finish_weight_update")


class Explorer:
    """Makes one move after the other, and looks at everything after each."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.house = model.house
        self.trace: list[str] = []
        self._random = random.Random(seed)
        self._moves: dict[Callable[[], Awaitable[object]], int] = {
            self.train: 10,
            self.train_and_kill: 6,
            self.work: 4,
            self.open: 2,
            self.close: 1,
            self.claim_the_controller_of_another_run: 1,
            self.repeat: 2,
            self.call_out_of_order: 1,
            self.call_from_the_grave: 1,
            self.orders_arrive_late: 2,
            self.heartbeat: 1,
            self.restart: 2,
            self.go_down: 1,
            self.strike_an_engine: 5,
            self.heal_an_engine: 3,
            self.a_supervisor_starts_an_engine: 2,
            self.time_passes: 1,
        }

    async def explore(self, moves: int) -> None:
        """Make this many moves, then mend everything: all must go on."""
        try:
            for _ in range(moves):
                (move,) = self._random.choices(list(self._moves), list(self._moves.values()))
                self.trace.append(move.__name__)
                await move()
                await self.model.check()
            self.trace.append("recovery")
            await self.model.recover()
            await self.model.check()
        except BaseException as error:
            error.add_note("moves: " + "; ".join(self.trace))
            raise

    def _say(self, *words: object) -> None:
        self.trace[-1] += f"({', '.join(map(str, words))})"

    def _job(self) -> Job:
        job = self.model.jobs[self._random.choice(sorted(RUNS))]
        self._say(job.run_id)
        return job

    def _coin(self) -> bool:
        return self._random.random() < 0.5

    # ---------------------------------------------------------------------------------------------- trainers, workers

    async def train(self) -> None:
        """The next calls of a trainer."""
        job, calls = self._job(), self._random.randint(1, 10)
        ways = {name: self._random.random() < 0.25 for name in ("abandons", "validates", "saves")}
        self._say(calls, *(name for name, chosen in ways.items() if chosen))
        await self.model.train(job, calls, **ways)

    async def train_and_kill(self) -> None:
        """The next calls of a trainer, killing services as an engine is given a command, or has carried it out."""
        job, calls = self._job(), self._random.randint(4, 12)
        who, command, after = (
            self._random.choice(["scheduler", "engine", "both"]),
            self._random.choice(COMMANDS),
            self._coin(),
        )
        self._say(calls, who, command, "after" if after else "before")
        gate = self.house.room.gate = Gate(command, after)
        training = asyncio.ensure_future(self.model.train(job, calls))
        arriving = asyncio.ensure_future(gate.arrived.wait())
        await asyncio.wait((training, arriving), return_when=asyncio.FIRST_COMPLETED)
        arriving.cancel()
        killed = []
        if not training.done():
            killed = [self.house.scheduler] if who != "engine" else []
            killed += [self.house.engines[job.run_id]] if who != "scheduler" else []
            for resident in killed:
                await resident.kill()
        self.house.room.gate = Gate()
        gate.opened.set()
        for resident in killed:
            await resident.start()
        await training

    async def work(self) -> None:
        """A worker takes groups and finishes some; a prompt source adds some."""
        job = self._job()
        added, claimed, finished = (self._random.randint(1, 8) for _ in range(3))
        self._say(added, claimed, finished)
        try:
            await self.model.groups.add(job, added)
            await self.model.groups.claim(job, claimed)
            await self.model.groups.finish(job, finished)
        except Refused:
            return

    async def open(self) -> None:
        """A trainer was killed, or closed its run before: another one takes its place, perhaps at an older step."""
        job, older = self._job(), self._coin()
        self._say("older" if older else "live")
        await self.model.resume(job, older)

    async def close(self) -> None:
        """A job ends, and its engines with it."""
        await self.model.close(self._job())

    async def claim_the_controller_of_another_run(self) -> None:
        """A slip in a configuration must not give one run the engines of another."""
        job = self._job()
        if not job.known or not all(resident.running for resident in self.house.residents):
            return
        request = pb.OpenRunRequest(
            run_id="stranger",
            config=run_config(),
            buffer_target=self.house.buffer.target,
            engine_target=self.house.engines[job.run_id].target,
        )
        buffer = self.model.buffer
        await self.model.asked(buffer.CreateRun(bpb.CreateRunRequest(run_id="stranger", config=bpb.RunConfig())))
        assert await self.model.reason(self.model.scheduler.OpenRun(request))
        await self.model.asked(buffer.DeleteRun(bpb.DeleteRunRequest(run_id="stranger")))

    # ---------------------------------------------------------------------------------------- repeated, late and wrong

    async def repeat(self) -> None:
        """A call whose answer was lost comes again, perhaps long after."""
        job, back = self._job(), self._random.randint(1, 12)
        if job.alive and len(job.calls) >= back and self.house.scheduler.running:
            name, request, answer = job.calls[-back]
            self._say(name)
            assert await self.model.send(name, request) == answer

    async def call_out_of_order(self) -> None:
        """A call that may not come changes nothing, least of all who has the GPUs."""
        job, ahead = self._job(), self._random.randint(2, 9)
        if not job.alive or not self.house.scheduler.running:
            return
        who = job.who
        for name, request in (
            ("BeginStep", pb.BeginStepRequest(step=job.step + ahead, **who)),
            ("EndStep", pb.EndStepRequest(step=job.step + ahead, **who)),
            ("BeginSample", pb.BeginSampleRequest(step=job.step, mini_batch=ahead, **who)),
            ("PrepareStep", pb.PrepareStepRequest(step=job.step + ahead, **who)),
        ):
            assert await self.model.reason(self.model.send(name, request)) == "OUT_OF_ORDER"
        never = pb.CompleteLendRequest(lend_id="never", **who)
        assert await self.model.reason(self.model.send("CompleteLend", never)) == "LEND_UNKNOWN"

    async def call_from_the_grave(self) -> None:
        """A trainer that was succeeded is refused, whatever it calls."""
        job = self._job()
        if not job.alive or job.epoch < 2 or not self.house.scheduler.running:
            return
        who = job.who | {"epoch": job.epoch - 1}
        for name, request in (
            ("BeginStep", pb.BeginStepRequest(step=job.step + 1, **who)),
            ("EndStep", pb.EndStepRequest(step=job.step, **who)),
            ("Heartbeat", pb.HeartbeatRequest(**who)),
        ):
            assert await self.model.reason(self.model.send(name, request)) == "STALE_EPOCH"

    async def orders_arrive_late(self) -> None:
        """Orders of lends that are over, delivered by a network that kept them: they must wake nothing."""
        job = self._job()
        if not self.model.trains(job) or not self.house.engines[job.run_id].running:
            return
        stub = self.model.engines[job.run_id]
        for lend_id, epoch in list(job.lends.items())[-4:]:
            who = job.who | {"epoch": epoch, "lend_id": lend_id}
            assert await self.model.reason(stub.BeginLend(epb.BeginLendRequest(**who)))
            assert await self.model.reason(stub.FinishLend(epb.FinishLendRequest(weight_version=job.step, **who)))

    async def heartbeat(self) -> None:
        """A trainer is alive."""
        job = self._job()
        if job.alive and self.house.scheduler.running:
            answer = await self.model.send("Heartbeat", pb.HeartbeatRequest(run_id=job.run_id, epoch=job.epoch))
            assert answer.lease.ToTimedelta().total_seconds() > 0

    # ------------------------------------------------------------------------------------------------------- accidents

    def _resident(self) -> Resident:
        resident = self._random.choice(self.house.residents)
        self._say(resident.name)
        return resident

    async def restart(self) -> None:
        """A service ends, in order or not, and comes back at once."""
        resident, order = self._resident(), self._coin()
        if resident.running:
            await (resident.stop() if order else resident.kill())
        await resident.start()

    async def go_down(self) -> None:
        """A service ends, and stays away."""
        resident = self._resident()
        if resident.running:
            await resident.kill()

    async def strike_an_engine(self) -> None:
        """An engine dies, hangs, fails a command or loses a reply."""
        cell = self.house.room.cells[self._random.choice(sorted(self.house.room.cells))]
        what, command = self._random.choice(["die", "hang", "hang", "fail", "lose"]), self._random.choice(COMMANDS[:3])
        self._say(cell.spec.replica_id, what, command)
        match what:
            case "die" if not cell.dead:
                await cell.die()
            case "hang":
                cell.hang()
            case "fail":
                cell.failing[command] = 1
            case "lose":
                cell.losing[command] = 1

    async def heal_an_engine(self) -> None:
        """An engine is well again, or back."""
        broken = [cell for _, cell in sorted(self.house.room.cells.items()) if not cell.well]
        if broken:
            cell = self._random.choice(broken)
            self._say(cell.spec.replica_id)
            await self.model.heal(cell)

    async def a_supervisor_starts_an_engine(self) -> None:
        """It found the engine of a run dead, or killed it; it knows nothing of trainers."""
        job = self._job()
        if job.open:
            cell = self._random.choice(sorted(self.house.room.of(job.run_id), key=lambda cell: cell.spec.replica_id))
            self._say(cell.spec.replica_id)
            await cell.start_anew()

    async def time_passes(self) -> None:
        """Leases run out, and the wall clock is set."""
        seconds, jump = self._random.choice([1.0, 30.0, 1000.0]), self._random.choice([0.0, -86400.0, 3600.0])
        self._say(seconds, jump)
        self.house.clock.jump(jump)
        await self.house.clock.advance(seconds)


@asynccontextmanager
async def explorer(root: Path, seed: int) -> AsyncIterator[Explorer]:
    house = House(root, list(RUNS))
    await house.start()
    try:
        model = Model(house)
        await model.begin()
        yield Explorer(model, seed)
    finally:
        await house.close()


@pytest.mark.parametrize("seed", range(4))
async def test_no_gpu_ever_has_two_owners(tmp_path: Path, seed: int) -> None:
    """Each service may be right alone: it is between them that a trainer is told to train over an engine's memory."""
    async with explorer(tmp_path, seed) as exploring:
        await exploring.explore(25)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(100, 160))
async def test_no_gpu_ever_has_two_owners_for_long(tmp_path: Path, seed: int) -> None:
    """The same for longer, and more often."""
    async with explorer(tmp_path, seed) as exploring:
        await exploring.explore(60)
