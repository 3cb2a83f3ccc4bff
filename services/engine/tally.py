"""What one replica's engine was told to do, how long that took, and how often it died, for the metrics.

Invariant: it is counted since the replica was registered with this process, and goes with the replica.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.engine.domain.calls import Call


@dataclass(slots=True)
class Done:
    """One kind of command. `seconds` is wall time, of the failed ones too."""

    count: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """The commands by name, as `wake_up`."""

    deaths: int = 0
    commands: dict[str, Done] = field(default_factory=dict)

    @contextmanager
    def command(self, call: Call) -> Iterator[None]:
        """Count `call`, which lasts as long as this is entered."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(call).__name__).lower()
        done = self.commands.setdefault(name, Done())
        begun = time.perf_counter()
        try:
            yield
        except BaseException:
            done.failures += 1
            raise
        finally:
            done.count += 1
            done.seconds += time.perf_counter() - begun
