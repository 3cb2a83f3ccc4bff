"""Kills one process of a deployed job at a random moment, again and again, and measures how long the job stands still.

    python -m tests.ray_deploy.chaos --kills 50 --seed 1

A victim is drawn from: the process of a service or an agent, the actor above it, a worker, the trainer, and (one in
ten) a whole rollout or hybrid node, which is added again at once. The next kill comes a random moment after the victim
is back and the trainer has committed a mini-batch.

Invariants: nobody but Ray, the actors and the crew starts anything again; every choice comes from the seed; in the end
every result that a worker was acknowledged is accounted for once, by what the trainer read, by the buffer's ledger, and
by its journal once it is stopped. Exit code 0 if the loop recovered each time and the books agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from services.buffer.storage.audit import audit
from tests.ray_deploy.accounts import discrepancies
from tests.ray_deploy.crew import Crew
from tests.ray_deploy.jobs import HYBRID, STANDALONE, described, small_job
from tests.ray_deploy.raylets import Raylets, raylets
from turnout import ray as deployments

NAME: Final = "chaos"
RECOVERS_WITHIN_S: Final = 120.0
"""A loop that stands still for longer needs a person."""

MOMENT_S: Final = 3.0
"""A kill comes at a random moment of these seconds: about two steps of the job."""

NODES: Final = {"first": STANDALONE, "second": STANDALONE, "hybrid": HYBRID}
NODE_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. Times are wall seconds since it."""

    victim: str
    back_s: float
    """Until the victim serves again, its replicas registered; a worker or trainer: until it runs."""
    pause_s: float
    """Longest time between two mini-batches that the trainer committed, from the last one before the kill to the first
    one after the victim was back."""


class Chaos:
    """One run of it."""

    def __init__(self, cluster: Raylets, crew: Crew, rng: random.Random) -> None:
        self._cluster = cluster
        self._crew = crew
        self._rng = rng
        self.kills: list[Kill] = []

    async def kill(self) -> None:
        """Kill one, and wait until all is well again. Raises TimeoutError, naming the victim."""
        node = self._rng.choice(sorted(NODES)) if self._rng.random() < NODE_SHARE else ""
        name, back = (f"node {node}", _until(_well)) if node else await self._draw()
        began = time.monotonic()
        before = len(self._crew.said("committed"))
        if node:
            # How long Ray takes to start a raylet is not what is tried here, and counts in `back_s` alone.
            await asyncio.to_thread(self._cluster.kill, node)
            await asyncio.to_thread(self._cluster.add, node, NODES[node])
        try:
            async with asyncio.timeout(RECOVERS_WITHIN_S):
                await back
                back_s = time.monotonic() - began
                after = len(self._crew.said("committed"))
                await self._crew.until("committed", after + 1, RECOVERS_WITHIN_S)
        except TimeoutError:
            states = [asdict(one) for one in await asyncio.to_thread(deployments.status, NAME) if one.problem]
            ends = {member.name: member.ends[-3:] for member in self._crew.members}
            raise TimeoutError(f"no recovery from the kill of {name}: {states}, {ends}") from None
        times = [at for at, _ in self._crew.said("committed")[before - 1 : after + 1]]
        pause_s = max(second - first for first, second in pairwise(times))
        self.kills.append(Kill(name, round(back_s, 2), round(pause_s, 2)))
        await asyncio.sleep(self._rng.uniform(0.0, MOMENT_S))

    async def _draw(self) -> tuple[str, Any]:
        """A process, killed when the second value is awaited, which is done when it is back."""
        states = await asyncio.to_thread(_states)
        choices: list[tuple[str, Any]] = []
        for name, state in sorted(states.items()):
            choices.append((f"process of {name}", self._member(name, state.pid, actor=False)))
            choices.append((f"actor of {name}", self._member(name, state.supervisor_pid, actor=True)))
        choices += [(member.name, self._crew_member(member.name)) for member in self._crew.members]
        chosen = self._rng.randrange(len(choices))
        for number, (_, work) in enumerate(choices):
            if number != chosen:
                work.close()
        return choices[chosen]

    async def _member(self, name: str, pid: int | None, *, actor: bool) -> None:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            state = _states().get(name)
            if state is None or not _well():
                return False
            return pid != (state.supervisor_pid if actor else state.pid)

        await _until(back)

    async def _crew_member(self, name: str) -> None:
        member = next(one for one in self._crew.members if one.name == name)
        pid = member.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await _until(lambda: member.pid not in (None, pid))


def _states() -> dict[str, deployments.MemberState]:
    return {one.name: one.state for one in deployments.status(NAME) if one.state is not None}


def _well() -> bool:
    return not any(one.problem for one in deployments.status(NAME))


async def _until(condition: Any) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - what is waited for is in other processes
        await asyncio.sleep(0.1)


async def run(cluster: Raylets, kills: int, seed: int, directory: Path) -> dict[str, Any]:
    """Run a job, kill, and account for everything."""
    rng = random.Random(seed)
    job = small_job(steps=100_000)
    description = described(job, NAME, directory, trainer={"resource": "head"})
    made = await asyncio.to_thread(lambda: deployments.up(description, rng=rng))
    async with Crew(job, made) as crew:
        await crew.until("committed", 10, RECOVERS_WITHIN_S)
        times = [at for at, _ in crew.said("committed")]
        undisturbed = [after - before for before, after in pairwise(times)]
        chaos = Chaos(cluster, crew, rng)
        failure = ""
        try:
            for number in range(kills):
                await chaos.kill()
                print(f"{number + 1:3} {chaos.kills[-1]}", file=sys.stderr, flush=True)
            ledger = await crew.finish(RECOVERS_WITHIN_S)
        except TimeoutError as error:
            failure, ledger = str(error) or "the trainer did not end", {}
        acknowledged = sum(line["event"] == "acknowledged" for worker in crew.workers for _, line in worker.lines)
        wrong = discrepancies(crew, ledger, job.group_size) if ledger else ["the trainer told no ledger"]
        pauses = sorted(kill.pause_s for kill in chaos.kills)
        return {
            "seed": seed,
            "kills": len(chaos.kills),
            "recovered": not failure,
            "failure": failure,
            "discrepancies": wrong[:20],
            "acknowledged_results": acknowledged,
            "ledger": {name: ledger.get(name) for name in ("added", "committed", "evicted", "present")},
            "median_pause_s": statistics.median(pauses) if pauses else None,
            "longest_pause_s": max(pauses, default=None),
            "median_back_s": statistics.median(kill.back_s for kill in chaos.kills) if pauses else None,
            "undisturbed_mini_batch_s": round(statistics.median(undisturbed), 2),
            "ends_nobody_asked_for": {
                member.name: [end for end in member.ends if not end.startswith("-9")] for member in crew.members
            },
            "by_victim": {
                victim: sorted(kill.pause_s for kill in chaos.kills if kill.victim == victim)
                for victim in sorted({kill.victim for kill in chaos.kills})
            },
        }


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.ray_deploy.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="where every choice comes from (default: 0)")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="turnout-chaos-") as directory,
        raylets(**NODES) as cluster,
    ):
        try:
            outcome = asyncio.run(run(cluster, given.kills, given.seed, Path(directory)))
        finally:
            deployments.down(NAME)
        outcome["discrepancies"] += asyncio.run(_stopped_books(Path(directory), outcome["ledger"]))
    print(json.dumps(outcome, indent=1))
    return 0 if outcome["recovered"] and not outcome["discrepancies"] else 1


async def _stopped_books(directory: Path, told: dict[str, int]) -> list[str]:
    """What the buffer's journal says otherwise than its service did."""
    found = await audit(directory / "buffer")
    ledgers = [one.ledger for one in found.partitions]
    kept = {
        "added": sum(one.added for one in ledgers),
        "committed": sum(one.committed for one in ledgers),
        "evicted": sum(one.evicted for one in ledgers),
        "present": sum(one.present.present for one in ledgers),
    }
    return [] if found.balanced and kept == told else [f"the journal has {kept}, the service said {told}"]


if __name__ == "__main__":
    sys.exit(main())
