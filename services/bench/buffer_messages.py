"""The messages of the buffer bench.

Invariants: groups have GROUP trajectories, each with one output of one segment, one reward and, where a figure wants
it, SMALL bytes inline; everything is built and serialised before the clock runs, for both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import duration

RUN: Final = "bench"
PARTITION: Final = "train"
STEP: Final = 1

GROUP: Final = 8
"""Trajectories of a group."""

SMALL: Final = 64
"""Bytes of a small payload: a few token ids."""

LONG_S: Final = 3600.0
"""Longer than any bench."""


def create_run(run_id: str, *, group: int = GROUP) -> pb.CreateRunRequest:
    """A run that holds everything and asks for nothing."""
    config = pb.RunConfig(
        partitions=[pb.PartitionConfig(name=PARTITION, kind=pb.PARTITION_KIND_TRAINING, default_group_size=group)],
        refill=False,
        caps=pb.Caps(max_groups=1_000_000, max_parked_waits=10_000),
    )
    return pb.CreateRunRequest(run_id=run_id, config=config)


def add(run_id: str, ids: Iterable[str]) -> pb.AddGroupsRequest:
    """Prompts without content."""
    groups = [pb.GroupSpec(group_id=group_id) for group_id in ids]
    return pb.AddGroupsRequest(run_id=run_id, partition=PARTITION, step=STEP, groups=groups)


def results(ids: Iterable[str], *, group: int = GROUP, payload: int = SMALL) -> Iterator[pb.TrajectoryResult]:
    """The results of whole groups."""
    data = bytes(range(256)) * (payload // 256 + 1)
    for group_id in ids:
        for index in range(group):
            output = pb.Output(
                prompt_tokens=200,
                segments=[pb.Segment(tokens=500 + index, weight_version=0, replica_id="replica-3")],
                rewards={"score": index / group},
            )
            if payload:
                output.payload.inline = data[:payload]
            yield pb.TrajectoryResult(group_id=group_id, index=index, outputs=[output])


def finish(run_id: str, ids: Iterable[str], *, group: int = GROUP, payload: int = SMALL) -> bytes:
    """A FinishTrajectories of whole groups."""
    request = pb.FinishTrajectoriesRequest(
        run_id=run_id, partition=PARTITION, results=results(ids, group=group, payload=payload)
    )
    return request.SerializeToString()


def finish_header(run_id: str) -> bytes:
    """The first frame of a FinishStream."""
    header = pb.FinishStreamHeader(run_id=run_id, partition=PARTITION)
    return pb.FinishStreamRequest(header=header).SerializeToString()


def finish_batch(sequence: int, ids: Iterable[str]) -> bytes:
    """A frame of a FinishStream with whole groups."""
    batch = pb.FinishStreamBatch(sequence=sequence, results=results(ids))
    return pb.FinishStreamRequest(batch=batch).SerializeToString()


def depth(run_id: str) -> bytes:
    """A GetSampleableCount."""
    return pb.GetSampleableCountRequest(run_id=run_id, partition=PARTITION, step=STEP).SerializeToString()


def wait(run_id: str, target: int) -> bytes:
    """A WaitForSampleable."""
    request = pb.WaitForSampleableRequest(
        run_id=run_id, partition=PARTITION, step=STEP, target=target, max_wait=duration(LONG_S)
    )
    return request.SerializeToString()


def sample(run_id: str, batch: int) -> bytes:
    """A Sample that takes what is there."""
    request = pb.SampleRequest(run_id=run_id, partition=PARTITION, step=STEP, batch=batch, max_wait=duration(0))
    return request.SerializeToString()


def names(prefix: str, count: int, start: int = 0) -> list[str]:
    """Ids of groups, as long as those that trainers make."""
    return [f"{prefix}-{number:08d}" for number in range(start, start + count)]
