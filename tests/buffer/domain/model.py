"""Short hands for tests of the pure domain: a run with a training and a validation partition, and its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.buffer.domain import results, work
from services.buffer.domain.claims import Claim, ClaimToken
from services.buffer.domain.config import (
    PartitionConfig,
    PartitionKind,
    RunConfig,
    Staleness,
    Strategy,
)
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import GroupSpec, Partition
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.domain.pump import Pumped
from services.buffer.domain.results import Failure, FailureKind, Result
from services.buffer.domain.run import Run, WaitSpec
from services.buffer.domain.waits import Wait, WaitEnd
from services.buffer.memory import Memory
from services.buffer.storage.imaging import RunImaging
from services.buffer.storage.loading import SnapshotReader
from services.buffer.wire.outputs import finished_from, partial_from, same_outputs
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


def config(
    *, max_versions: int | None = None, strategy: Strategy = Strategy.DROP, size: int = 1, **rest: Any
) -> RunConfig:
    """A configuration whose partitions have groups of `size`."""
    partitions = (
        PartitionConfig("train", PartitionKind.TRAINING, size),
        PartitionConfig("val", PartitionKind.VALIDATION, size),
    )
    return RunConfig(partitions=partitions, staleness=Staleness(max_versions, strategy), **rest)


def output(reward: float = 0.0, tokens: int = 1, version: int | None = None, payload: bytes | None = None) -> pb.Output:
    """One output with one segment and the reward "reward"."""
    made = pb.Output(segments=[pb.Segment(tokens=tokens, weight_version=version)], rewards={"reward": reward})
    if payload is not None:
        made.payload.inline = payload
    return made


def result(group_id: str, index: int, outputs: Iterable[pb.Output], token: ClaimToken | None = None) -> Result:
    """The result of one trajectory."""
    return Result(group_id, index, finished_from(outputs, group_id, index), token)


def settle(partition: Partition, made: Result, at: Moment) -> None:
    """Settle a trajectory."""
    results.finish(partition, made, at, same_outputs)


class World:
    """A run, the time, and the trainer's view of it."""

    def __init__(self, settings: RunConfig | None = None, partition: str = "train") -> None:
        self.now = 0.0
        self.store = MemoryPayloadStore()
        self.run = Run("run", settings or config(), id_prefix="t", store=self.store, at=self.at)
        self.name = partition

    @property
    def at(self) -> Moment:
        return Moment(self.now, 1_700_000_000.0 + self.now)

    @property
    def partition(self) -> Partition:
        return self.run.partition(self.name)

    def restart(self) -> None:
        """Write the run down, forget it, and read it back, as a service does with a snapshot."""
        memory = Memory()
        reader = SnapshotReader(memory, self.store)
        reader.feed(st.Part(begin=st.Begin(now=self.now, created=1)))
        imaging = RunImaging(self.run, {})
        for payloads, part in imaging.parts():
            imaging.release(payloads)
            reader.feed(st.Part.FromString(part.SerializeToString()))
        self.run = memory.runs.require(self.run.run_id)
        self.run.restart(self.run.state.ids.prefix + "x", self.at)
        assert sorted(self.store.retain(self.run.state.payloads.ids())) == []

    def add(self, *group_ids: str, step: int = 0, size: int | None = None, **rest: Any) -> int:
        specs = [GroupSpec(group_id, size) for group_id in group_ids]
        remaining = self.run.add_groups(self.partition, specs, step, self.at, **rest)
        self.run.contact(self.at, step)
        return remaining

    def claim(self, limit: int = 1, worker: str = "w") -> list[Claim]:
        claims: list[Claim] = []
        while limit > 0 and (group := work.next_group(self.partition)) is not None:
            claims.append(work.claim(self.partition, group, worker, limit, self.at))
            limit -= len(claims[-1].open)
        return claims

    def finish(self, claim: Claim, outputs: Iterable[pb.Output] = (), index: int | None = None) -> None:
        made = tuple(outputs) or (output(),)
        for position in sorted(claim.open) if index is None else [index]:
            settle(self.partition, result(claim.group.group_id, position, made, claim.token), self.at)

    def fail(
        self,
        claim: Claim,
        kind: FailureKind = FailureKind.RETRYABLE,
        partial: Sequence[pb.Output] = (),
        error: str = "no",
    ) -> None:
        for position in sorted(claim.open):
            kept = partial_from(partial, claim.group.group_id, position)
            failure = Failure(claim.group.group_id, position, kind, claim.token, error, kept)
            results.fail(self.partition, failure, self.at)

    def finish_new(self, *group_ids: str, step: int = 0, rewards: Sequence[float] = (0.0,)) -> None:
        """Add groups and finish them, with one reward per trajectory."""
        self.add(*group_ids, step=step, size=len(rewards))
        for group_id in group_ids:
            for index, reward in enumerate(rewards):
                settle(self.partition, result(group_id, index, (output(reward),)), self.at)

    def depth(self, step: int | None = None) -> int:
        return self.partition.depth(self.run.state.step if step is None else step, self.now).sampleable

    def wait(
        self, target: int, step: int | None = None, *, trainer: bool = True, **rest: Any
    ) -> tuple[Wait, WaitEnd | None, Pumped]:
        """Enter a wait and pump: the wait, its end if it ended at once, and all that was told."""
        spec = WaitSpec(self.run.state.step if step is None else step, target, **rest)
        wait, answered = self.run.open_wait(self.partition, spec, self.at, trainer=trainer)
        if trainer:
            self.run.contact(self.at, spec.step)
        pumped = self.pump()
        ended = {id(other): end for other, end in pumped.ended}
        return wait, answered or ended.get(id(wait)), pumped

    def pump(self) -> Pumped:
        return self.run.pump(self.partition, self.at)

    def sample(self, batch: int, step: int | None = None, **rest: Any) -> WaitEnd | None:
        """Try to sample once."""
        wait, end, _ = self.wait(batch, step, sample=True, **rest)
        self.run.close_wait(self.partition, wait, self.at)
        return end
