"""What a process of the job is told when it starts.

Invariants: everything is in one JSON argument; nothing comes from the environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.learner.job import Job


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job, and where its services are."""

    job: Job
    prompts: Path
    buffer: str = ""
    engine: str = ""
    scheduler: str = ""

    def to_json(self) -> str:
        """Return it as an argument."""
        values = {
            "job": self.job.to_json(),
            "prompts": str(self.prompts),
            "buffer": self.buffer,
            "engine": self.engine,
            "scheduler": self.scheduler,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Return what `to_json` wrote."""
        values = json.loads(text)
        job, prompts = Job.from_json(values.pop("job")), Path(values.pop("prompts"))
        return cls(job=job, prompts=prompts, **values)
