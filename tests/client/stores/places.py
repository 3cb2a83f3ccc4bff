"""A buffer, and what the tests of stores do with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, duration

RUN = "r1"


def create(client: BufferClient, group_size: int = 1) -> None:
    """Make the run."""
    partition = buffer_pb2.PartitionConfig(name="train", default_group_size=group_size)
    client.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=RUN, config=buffer_pb2.RunConfig(partitions=[partition])))


def finish(client: BufferClient, group_id: str, refs: Sequence[buffer_pb2.PayloadRef]) -> None:
    """Add a group and finish it, with one output per reference."""
    group = buffer_pb2.GroupSpec(group_id=group_id)
    client.calls.AddGroups(buffer_pb2.AddGroupsRequest(run_id=RUN, partition="train", step=1, groups=[group]))
    outputs = [
        buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1)], payload=buffer_pb2.Payload(ref=ref)) for ref in refs
    ]
    result = buffer_pb2.TrajectoryResult(group_id=group_id, index=0, outputs=outputs)
    answer = client.calls.FinishTrajectories(
        buffer_pb2.FinishTrajectoriesRequest(run_id=RUN, partition="train", results=[result])
    )
    assert [outcome.reason for outcome in answer.outcomes] == [""]


def sample(client: BufferClient, batch: int = 1) -> tuple[str, list[buffer_pb2.PayloadRef]]:
    """Take a batch; return the lease and the references of its outputs."""
    request = buffer_pb2.SampleRequest(run_id=RUN, partition="train", step=1, batch=batch, max_wait=duration(20))
    sampled = client.sample(request)
    assert sampled.done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED, sampled.done.reason
    outputs = [output for group in sampled.groups for one in group.trajectories for output in one.outputs]
    return sampled.done.lease_id, [output.payload.ref for output in outputs]


def release(client: BufferClient, lease_id: str) -> None:
    """Commit a batch and let its payloads go."""
    client.calls.CommitSample(buffer_pb2.CommitSampleRequest(run_id=RUN, lease_id=lease_id))
    client.calls.ReleasePayload(buffer_pb2.ReleasePayloadRequest(run_id=RUN, lease_id=lease_id))


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Return once something holds that another thread or process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
