"""One trajectory that a worker has to produce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnout.buffer.v1 import buffer_pb2

Report = Callable[[buffer_pb2.TrajectoryProgress], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed trajectory with all that is needed to produce it."""

    run_id: str
    """The run."""
    partition: str
    """Partition of the group."""
    group_id: str
    """The group."""
    index: int
    """Position in the group."""
    token: buffer_pb2.ClaimToken
    """Proof of the claim."""
    prompt: bytes
    """The prompt, as it was added."""
    content_type: str
    """Format of the prompt."""
    tags: Mapping[str, str]
    """Labels of the group."""
    group_size: int
    """Trajectories in the group."""
    born_step: int
    """Step the group was born at."""
    partial: buffer_pb2.PartialOutput | None
    """Output of an earlier attempt to continue from, its payloads inline."""
    report_to: Report
    """Where `report` goes."""

    @property
    def attempt(self) -> int:
        """Attempt, from 1."""
        return self.token.attempt

    def report(self, done: int, total: int | None = None, *, unit: str = "", engine_request_id: str = "") -> None:
        """Tell how far it is, in tokens unless `unit` says otherwise. Sent in batches; only the newest counts."""
        self.report_to(
            buffer_pb2.TrajectoryProgress(
                token=self.token,
                group_id=self.group_id,
                index=self.index,
                done=done,
                total=total,
                unit=unit,
                engine_request_id=engine_request_id,
            )
        )
