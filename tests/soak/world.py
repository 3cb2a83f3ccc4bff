"""One soak: everything is started, mistreated, drained and compared.

Invariants: whatever happens, no process and no mount is left; what is random comes from the seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.soak import book, oracle
from tests.soak.crew import Member
from tests.soak.disk import Disk, small_disk
from tests.soak.options import RUNS, SoakOptions
from tests.soak.proxy import ChaosProxy
from tests.soak.report import Report, slope
from tests.soak.service import ROOT, Service
from tests.soak.witness import Witness
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, duration

PARTITION: Final = "train"

CLAIM_S: Final = 5.0
SAMPLE_S: Final = 20.0
UPLOAD_S: Final = 30.0
"""Lives of claims, leases and uploads: short, so that a soak of a minute sees them run out."""

_FULL_S: Final = (2.0, 8.0)
"""How long the disk stays full."""

_WARM_S: Final = 60.0
"""How long the first batch of each run may take, with many interpreters starting."""

_SAMPLE_EVERY_S: Final = 1.0
_SETTLED_BYTES: Final = 4 * 1024 * 1024
"""What may lie in segments once nothing lives in them: the newest one, which is given up from 1 MiB on, and a part."""

_LINE: Final = 500
"""Characters shown of what went wrong while the soak runs; the report has more."""

Tell = Callable[[str], None]


def run_config(run_id: str) -> pb.RunConfig:
    """Return the configuration of a run."""
    lives = pb.LeaseTimes(claim=duration(CLAIM_S), sample=duration(SAMPLE_S), payload=duration(UPLOAD_S))
    config = pb.RunConfig(max_attempts=4, lease_times=lives)
    if run_id == "drop":
        config.staleness.max_versions = 4
        config.group_filter_metric = "reward"
    else:
        config.staleness.max_versions = 6
        config.staleness.strategy = pb.STALENESS_STRATEGY_WAIT
    return config


@dataclass(slots=True)
class Chaos:
    """When which fault happens."""

    rng: random.Random
    until: float
    counts: Counter[str] = field(default_factory=Counter)

    async def every(self, mean: float, fault: Callable[[], Awaitable[None]]) -> None:
        """Let a fault happen at random, once in `mean` seconds on average; 0 means never."""
        while mean > 0:
            pause, left = self.rng.expovariate(1 / mean), self.until - time.monotonic()
            await asyncio.sleep(max(0.0, min(pause, left)))
            if pause >= left:
                return
            await fault()


class Soak:
    """A soak over its life."""

    def __init__(self, options: SoakOptions, tell: Tell) -> None:
        self._options = options
        self._tell = tell
        self._rng = random.Random(options.seed)
        self._resident: list[tuple[float, int]] = []
        self._members: list[Member] = []
        self._chaos = Chaos(random.Random(self._rng.random()), 0.0)
        self._faults: list[str] = []

    @property
    def _trainers(self) -> list[Member]:
        return self._members[: len(RUNS)]

    @property
    def _workers(self) -> list[Member]:
        return self._members[len(RUNS) :]

    async def run(self) -> Report:
        """Do it all; returns what came of it. Raises only what keeps a soak from being one."""
        options = self._options
        begun = time.monotonic()
        async with AsyncExitStack() as stack:
            disk = stack.enter_context(small_disk(options.directory / "disk", options.disk_bytes))
            proxy = await stack.enter_async_context(ChaosProxy(random.Random(self._rng.random())))
            log = options.directory / "service.log"
            data_dir = disk.directory / "buffer"
            service = Service(data_dir, disk, options.durability, proxy, log, random.Random(self._rng.random()))
            stack.push_async_callback(service.close)
            await service.start()
            await self._create_runs(service.target)
            witnesses = [Witness(run_id) for run_id in RUNS]
            self._members = self._crew(proxy.target)
            for member in self._members:
                stack.push_async_callback(member.stop)
            background = [
                *(asyncio.create_task(witness.follow(proxy.target)) for witness in witnesses),
                asyncio.create_task(service.run()),
                asyncio.create_task(self._watch(service, witnesses, disk)),
            ]
            stack.push_async_callback(_cancel, background)
            lives = [asyncio.create_task(one.run(random.Random(self._rng.random()))) for one in self._members]
            stack.push_async_callback(_cancel, lives)

            # Faults begin once everything works, or a soak of seconds would see nothing else than starts.
            await _until(partial(_all_commit, witnesses), _WARM_S)
            self._chaos.until = time.monotonic() + options.seconds
            await self._mistreat(service, proxy, disk)
            self._tell("draining")
            drained_from = time.monotonic()
            (options.directory / "drain").touch()
            await self._drain(lives[: len(RUNS)])
            drain_s = time.monotonic() - drained_from
            for worker in self._workers:
                await worker.stop()
            ledgers = await self._final_state(service, witnesses)
            await self._settled(data_dir)
            await service.stop(for_good=True)
            self._check_files(data_dir)
            audited = await self._audit(data_dir, ledgers)
            return self._report(service, proxy, disk, witnesses, ledgers, drain_s=drain_s, audited=audited, begun=begun)

    # --------------------------------------------------------------------------------------------------------- the cast

    def _crew(self, target: str) -> list[Member]:
        directory, seed = str(self._options.directory), str(self._options.seed)
        common = (directory, str(self._options.largest), seed)
        crew = [Member(f"trainer-{run}", "tests.soak.trainer", (target, run, *common)) for run in RUNS]
        count = self._options.workers
        for number in range(count):
            # The last two are one for each run.
            kind = "rollout" if count >= 4 and number >= count - 2 else "own"
            run = RUNS[number % len(RUNS)]
            crew.append(Member(f"worker-{run}-{number}", "tests.soak.worker", (target, run, *common, kind)))
        return crew

    async def _create_runs(self, target: str) -> None:
        async with AsyncBufferClient(target) as client:
            for run_id in RUNS:
                await client.calls.CreateRun(pb.CreateRunRequest(run_id=run_id, config=run_config(run_id)))

    # ----------------------------------------------------------------------------------------------------------- faults

    async def _mistreat(self, service: Service, proxy: ChaosProxy, disk: Disk) -> None:
        rates, chaos = self._options.rates, self._chaos

        async def kill(members: list[Member]) -> None:
            if chaos.rng.choice(members).kill():
                chaos.counts["kill -9 of a worker" if members is workers else "kill -9 of a trainer"] += 1

        async def kill_service() -> None:
            if service.ready:
                service.kill()
                chaos.counts["kill -9 of the service"] += 1

        async def stop_service() -> None:
            if service.ready:
                chaos.counts["SIGTERM of the service"] += 1
                await service.stop(for_good=False)

        async def fill() -> None:
            chaos.counts["full disk"] += 1
            try:
                await asyncio.to_thread(disk.fill)
                await asyncio.sleep(chaos.rng.uniform(*_FULL_S))
            finally:
                disk.restore()

        async def tear() -> None:
            proxy.tear()

        workers, trainers = self._workers, self._trainers
        await asyncio.gather(
            chaos.every(rates.kill_worker, lambda: kill(workers)),
            chaos.every(rates.kill_trainer, lambda: kill(trainers)),
            chaos.every(rates.kill_service, kill_service),
            chaos.every(rates.stop_service, stop_service),
            chaos.every(rates.fill_disk if disk.small else 0.0, fill),
            chaos.every(rates.tear, tear),
            asyncio.sleep(max(0.0, chaos.until - time.monotonic())),
        )

    async def _watch(self, service: Service, witnesses: list[Witness], disk: Disk) -> None:
        """Take down memory, and say how it stands."""
        begun = told_at = time.monotonic()
        told: set[str] = set()
        while True:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            now = time.monotonic()
            resident = service.resident_bytes
            if resident is not None and now - service.ready_at[-1] > 2 * _SAMPLE_EVERY_S:
                self._resident.append((now - begun, resident))
            if now - told_at < 5.0:
                continue
            told_at = now
            seen = Counter(event.kind for witness in witnesses for event in witness.events)
            memory = f"{resident / 2**20:.0f} MiB" if resident is not None else "away"
            wrongs = self._wrongs(service, witnesses)
            for wrong in wrongs:
                if wrong not in told:
                    self._tell(f"WRONG: {wrong[:_LINE]}")
            told.update(wrongs)
            self._tell(
                f"{now - begun:5.0f} s  added {seen['ADDED']}, finished {seen['FINISHED']}, committed "
                f"{seen['COMMITTED']}, evicted {seen['EVICTED']}; service life {service.lives} ({memory}), kills "
                f"{sum(member.kills for member in self._members)}{', disk full' if disk.full else ''}"
                f"{f'; WRONG: {len(wrongs)}' if wrongs else ''}"
            )

    def _wrongs(self, service: Service, witnesses: list[Witness]) -> list[str]:
        """What has gone wrong so far."""
        return [
            *self._faults,
            *service.faults,
            *(fault for witness in witnesses for fault in witness.faults),
            *(wrong for member in self._members for wrong in (*member.wrongs, *member.faults)),
        ]

    # --------------------------------------------------------------------------------------------------------- the end

    async def _drain(self, trainers: list[asyncio.Task[None]]) -> None:
        _, late = await asyncio.wait(trainers, timeout=self._options.drain_within)
        if late:
            self._faults.append(f"{len(late)} trainers did not drain within {self._options.drain_within:g} s")

    async def _final_state(self, service: Service, witnesses: list[Witness]) -> dict[str, dict[str, Any]]:
        ledgers: dict[str, dict[str, Any]] = {}
        async with AsyncBufferClient(service.target) as client:
            for witness in witnesses:
                run_id = witness.run_id
                ledger = await client.calls.GetLedger(pb.GetLedgerRequest(run_id=run_id, partition=PARTITION))
                listed = await client.calls.ListGroups(pb.ListGroupsRequest(run_id=run_id, partition=PARTITION))
                there = ledger.present
                ledgers[run_id] = {
                    "added": ledger.added,
                    "committed": ledger.committed,
                    "evicted": ledger.evicted,
                    "evicted_by_reason": {
                        pb.EvictionReason.Name(one.reason).removeprefix("EVICTION_REASON_").lower(): one.count
                        for one in ledger.evicted_by_reason
                    },
                    "present": there.pending + there.running + there.finished + there.failed + there.sampled,
                }
                if len(listed.groups) != ledgers[run_id]["present"]:
                    self._faults.append(f"{run_id}: {len(listed.groups)} groups are listed, not {ledgers[run_id]}")
                caught_up = partial(_has, witness, listed.event_sequence)
                await _until(caught_up, 60.0)
                if witness.sequence < listed.event_sequence:
                    self._faults.append(f"{run_id}: of {listed.event_sequence} events {witness.sequence} were seen")
        return ledgers

    async def _settled(self, data_dir: Path) -> None:
        """Wait until what nobody needs has left the disk: uploads that were never named live longest."""
        await _until(lambda: _segment_bytes(data_dir) <= _SETTLED_BYTES, UPLOAD_S + SAMPLE_S + 30.0)

    def _check_files(self, data_dir: Path) -> None:
        left = _segment_bytes(data_dir)
        if left > _SETTLED_BYTES:
            self._faults.append(f"{left} bytes are left in payload segments in which nothing lives")
        for path in (data_dir / "checkpoints").rglob("*"):
            if path.is_file():
                self._faults.append(f"{path.name} is left of deleted checkpoints")

    async def _audit(self, data_dir: Path, ledgers: dict[str, dict[str, Any]]) -> bool:
        """Run `turnout buffer audit` and compare it with the ledgers."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.cli.main", "buffer", "audit", "--json"),
            *("--data-dir", str(data_dir)),
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
        if process.returncode != 0:
            self._faults.append(f"the audit ended with {process.returncode}: {errors.decode()[-500:]}")
            return False
        for found in json.loads(said)["partitions"]:
            if found["partition"] != PARTITION:
                continue
            ledger = ledgers[found["run_id"]]
            audited = {**{name: found[name] for name in ledger if name != "present"}}
            audited["present"] = sum(found["present"].values())
            if audited != ledger:
                self._faults.append(f"{found['run_id']}: the audit says {audited}, the ledger {ledger}")
        return True

    def _report(
        self,
        service: Service,
        proxy: ChaosProxy,
        disk: Disk,
        witnesses: list[Witness],
        ledgers: dict[str, dict[str, Any]],
        *,
        drain_s: float,
        audited: bool,
        begun: float,
    ) -> Report:
        directory = self._options.directory
        wrongs = self._wrongs(service, witnesses)
        batches = committed = results = restores = 0
        for witness in witnesses:
            run_id, ledger = witness.run_id, ledgers[witness.run_id]
            told = oracle.told_to_trainer(run_id, book.read(directory / f"trainer-{run_id}.book"))
            fates = oracle.fates_of(run_id, witness.events)
            books = [book.read(directory / f"{one.name}.book") for one in self._workers if one.arguments[1] == run_id]
            work = oracle.told_to_workers(books)
            counts = (ledger["added"], ledger["committed"], ledger["evicted"])
            wrongs += oracle.compare(run_id, told, fates, counts, ledger["present"])
            wrongs += oracle.compare_work(run_id, told, fates, work)
            batches += told.batches
            restores += told.restores
            committed += sum(event.kind == "COMMITTED" for event in witness.events)
            results += len(work.taken)
        if not committed:
            wrongs.append("nothing was committed: a soak of nothing proves nothing")
        return Report(
            seed=self._options.seed,
            seconds=self._options.seconds,
            durability=self._options.durability,
            wall_s=time.monotonic() - begun,
            drain_s=drain_s,
            small_disk=disk.small,
            faults={
                **self._chaos.counts,
                **{f"connection: {fault.value}": count for fault, count in proxy.faults.items()},
            },
            service_lives=service.lives,
            clock_shifts=service.shifts,
            started_in=service.started_in,
            recovered_in=self._recoveries(service),
            service_errors=dict(Counter(_event_of(line) for line in service.errors)),
            refused_starts=service.refused_starts,
            ledgers=ledgers,
            audited=audited,
            batches=batches,
            committed=committed,
            results_acknowledged=results,
            restores=restores,
            resident_mib=[size / 2**20 for _, size in self._resident],
            resident_slope_mib_per_min=slope(self._resident) * 60 / 2**20,
            wrongs=wrongs,
        )

    def _recoveries(self, service: Service) -> list[float]:
        """Seconds from each return of the service to the next success of each member that lived through it."""
        found = []
        for number, ready_at in enumerate(service.ready_at[1:], 1):
            until = service.ready_at[number + 1] if number + 1 < len(service.ready_at) else float("inf")
            for member in self._members:
                before = [life for life, at in member.oks if at < ready_at]
                after = [(life, at) for life, at in member.oks if ready_at <= at < until]
                if before and after and after[0][0] == before[-1]:
                    found.append(after[0][1] - ready_at)
        return sorted(found)


def _has(witness: Witness, sequence: int) -> bool:
    return witness.sequence >= sequence


def _all_commit(witnesses: list[Witness]) -> bool:
    return all(any(event.kind == "COMMITTED" for event in witness.events) for witness in witnesses)


async def _until(holds: Callable[[], bool], within_s: float) -> None:
    """Wait until it holds, or the time is over."""
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:  # noqa: ASYNC110 - other processes tell nobody
        await asyncio.sleep(0.2)


def _event_of(line: str) -> str:
    entry = json.loads(line) if line.endswith("}") else {}
    return str(entry.get("event", line[:80]))


def _segment_bytes(data_dir: Path) -> int:
    total = 0
    for path in (data_dir / "payloads").glob("segment-*"):
        # One may be removed this moment.
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
