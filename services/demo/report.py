"""How the trainer's process tells what it does: events of `services.demo.events` on stdout, one JSON line each.

Invariants: times are domain seconds since the job began; a line is written whole or not at all, at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO


class Reporter:
    """Writes events with the time of a job's clock."""

    def __init__(
        self, time_scale: float, *, out: TextIO | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._scale = time_scale
        self._out = out or sys.stdout
        self._monotonic = monotonic
        self._began = monotonic()
        self._state = ""

    def begin(self, **values: Any) -> None:
        """Start the job's clock."""
        self._began = self._monotonic()
        self.tell("job_began", began_unix_s=time.time(), **values)

    @property
    def now(self) -> float:
        """Domain seconds since the job began."""
        return (self._monotonic() - self._began) / self._scale

    def tell(self, event: str, **values: Any) -> None:
        """Write one event."""
        line = json.dumps({"at": self.now, "event": event, **values}, ensure_ascii=False)
        self._out.write(line + "\n")
        self._out.flush()

    def state(self, state: str, step: int) -> None:
        """Write the trainer's state, if it is another one."""
        if state != self._state:
            self._state = state
            self.tell("trainer", state=state, step=step)
