"""What a process of the demo is told when it starts.

Invariants: everything is in one JSON argument; nothing comes from the environment.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.demo.job import Job

PARTITION: Final = "train"
READY_LINE: Final = "ready"
"""What a worker prints once it claims."""

READY: Final = re.compile(f"^{READY_LINE}$")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job, and where its services are."""

    job: Job
    prompts: Path
    buffer: str = ""
    engine: str = ""
    scheduler: str = ""
    worker_id: str = ""

    def to_json(self) -> str:
        """Return it as an argument."""
        values = {
            "job": self.job.to_json(),
            "buffer": self.buffer,
            "engine": self.engine,
            "scheduler": self.scheduler,
            "prompts": str(self.prompts),
            "worker_id": self.worker_id,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Return what `to_json` wrote."""
        values = json.loads(text)
        job, prompts = Job.from_json(values.pop("job")), Path(values.pop("prompts"))
        return cls(job=job, prompts=prompts, **values)
