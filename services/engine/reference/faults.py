"""Faults on command, for tests of whoever uses the engine.

Invariant: nothing here happens unless a method of `FAULTS` was called, which needs a service started for it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any, Final

from services.runtime.errors import aborted, invalid_argument

FAULTS: Final = frozenset({"fault_die", "fault_exit", "fault_hang", "fault_fail", "fault_slow", "fault_heal"})
"""die: the engine dies. exit: its process does. hang: control calls never answer (with probe=true, probes neither).
fail: the next `times` calls named `call` fail. slow: each control call takes `seconds` longer. heal: no more faults."""

EXIT_CODE: Final = 70
"""EX_SOFTWARE of sysexits.h: an internal fault, told apart from a regular stop and from a signal."""


@dataclass(slots=True)
class Faults:
    """The faults that are switched on. `slow` is in wall seconds."""

    hang: bool = False
    hang_probe: bool = False
    slow: float = 0.0
    fail: dict[str, int] = field(default_factory=dict)
    healed: asyncio.Event = field(default_factory=asyncio.Event)

    def switch(self, method: str, arguments: dict[str, Any]) -> None:
        """Carry out one method other than fault_die."""
        match method:
            case "fault_exit":
                os._exit(EXIT_CODE)
            case "fault_hang":
                self.hang, self.hang_probe = True, bool(arguments.get("probe", False))
                self.healed.clear()
            case "fault_fail":
                self.fail[str(arguments.get("call", ""))] = int(arguments.get("times", 1))
            case "fault_slow":
                self.slow = float(arguments.get("seconds", 1.0))
            case "fault_heal":
                self.hang = self.hang_probe = False
                self.slow = 0.0
                self.fail.clear()
                self.healed.set()
            case _:
                raise invalid_argument("method", f"no fault {method!r}", value=method)

    async def strike(self, call: str) -> None:
        """What a control call suffers before it does anything."""
        if self.hang:
            await self.healed.wait()
        if self.slow:
            await asyncio.sleep(self.slow)
        if self.fail.get(call, 0) > 0:
            self.fail[call] -= 1
            raise aborted("ENGINE_FAILED", f"{call} failed in the engine", call=call)

    async def strike_probe(self) -> None:
        """What a probe suffers."""
        if self.hang_probe:
            await self.healed.wait()
