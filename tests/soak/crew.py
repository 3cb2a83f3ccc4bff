"""Workers and trainers as processes: started again whenever they are killed.

Invariants: leaving it ends every process; an end that nobody asked for is a fault; a trainer that has drained is not
started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from dataclasses import dataclass, field
from typing import Final

from services.processes.child import Child, ChildSpec
from tests.soak.service import ROOT

_AGAIN_S: Final = (0.1, 1.0)


@dataclass(slots=True)
class Member:
    """One worker or trainer over all its lives."""

    name: str
    module: str
    arguments: tuple[str, ...]
    """What follows the name and the number of the life."""

    lives: int = 0
    kills: int = 0
    done: bool = False
    child: Child | None = None
    oks: list[tuple[int, float]] = field(default_factory=list)
    """(life, time) of successes, at most four a second."""
    wrongs: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stopping: bool = False

    def spec(self) -> ChildSpec:
        """How to start its next life."""
        arguments = (self.name, str(self.lives), *self.arguments)
        return ChildSpec(self.name, self.module, arguments, ready=None, environment={"PYTHONPATH": str(ROOT)})

    def hear(self, line: str) -> None:
        """Take a line of its stdout."""
        try:
            said = json.loads(line)
        except ValueError:
            self.faults.append(f"{self.name} said {line!r}")
            return
        if "ok" in said:
            self.oks.append((self.lives, said["ok"]))
        if "wrong" in said:
            self.wrongs.append(said["wrong"])

    async def run(self, rng: random.Random) -> None:
        """Keep it alive until it is done or stopped."""
        while not self.stopping:
            self.lives += 1
            self.child = await Child.start(self.spec(), on_line=self.hear)
            code = await asyncio.shield(self.child.ended)
            if code == 0:
                self.done = True
                return
            if code != -signal.SIGKILL and not self.stopping:
                self.faults.append(f"{self.name} ended with {code}: {' | '.join(list(self.child.last_lines)[-12:])}")
            await asyncio.sleep(rng.uniform(*_AGAIN_S))

    def kill(self) -> bool:
        """kill -9; whether there was something to kill."""
        if self.child is None or self.child.ended.done() or self.done:
            return False
        self.kills += 1
        with contextlib.suppress(ProcessLookupError):
            self.child.process.send_signal(signal.SIGKILL)
        return True

    async def stop(self) -> None:
        """End it for good."""
        self.stopping = True
        if self.child is not None:
            await self.child.stop(5.0)
