"""Hostile calls, and what must hold after each of them.

Invariants: a service answers every call with a status of its own that is neither UNKNOWN nor INTERNAL; a call that was
refused changed nothing; a call without a token that allows it is refused as such, whatever it carries; the service
lives, logs no unexpected failure, and serves the next one. A call that an operator's token rightly allows may succeed:
it is counted, and what it left is the state that the next ones are held against.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from services.runtime.permissions import PERMISSIONS, Role
from tests.fuzz import wire
from tests.fuzz.messages import OTHER_RUN, RUN, random_bytes, random_message
from tests.fuzz.scene import Scene
from tests.security.houses import Call, Line, calls, connected

Code = grpc.StatusCode

_REFUSED: Final = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
_NEVER: Final = (Code.UNKNOWN, Code.INTERNAL)
_CUT: Final = (Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNAVAILABLE)
"""Ends of calls that may have been carried out, or may yet be."""

_MALFORMED: Final = 0.7
"""Share of calls that are no messages, or that their token does not allow; the rest is an operator's, well formed."""

_QUIET: Final = 5
"""Steps after a call that may have acted in which changes are put down to it."""

_ENOUGH: Final = 20
_DEADLINE_S: Final = 2.0
_BATCH: Final = 20


@dataclass
class Findings:
    """What came of the attack on one service."""

    service: str
    seed: int
    codes: Counter[str] = field(default_factory=Counter)
    allowed: int = 0
    """Well-formed calls of an operator that succeeded."""
    connections: int = 0
    """Connections that did not speak gRPC."""
    wrong: list[str] = field(default_factory=list)

    @property
    def made(self) -> int:
        """Calls and connections."""
        return self.codes.total() + self.connections

    def line(self) -> str:
        """One line for a person."""
        codes = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        return (
            f"{self.service}: {self.made} (seed {self.seed}): {len(self.wrong)} wrong; {codes}; "
            f"{self.allowed} allowed, {self.connections} raw connections"
        )


@dataclass(frozen=True)
class _Shot:
    """One hostile call."""

    call: Call
    messages: list[bytes]
    token: str | None
    refused: bool
    """Whether the token alone must be enough to refuse it."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def describe(self) -> str:
        raw = ", ".join(f"{message[:60].hex()} ({len(message)} B)" for message in self.messages)
        return f"{self.call.path} [{raw}] token {(self.token or 'none').split('.')[1:2]}"


class Attack:
    """The attack on one service of a scene."""

    def __init__(self, scene: Scene, service: str, seed: int) -> None:
        self._scene = scene
        self._service = service
        self._rng = random.Random(f"{seed} {service}")
        self._calls = list(calls(service))
        self._quiet = _QUIET
        self.findings = Findings(service, seed)

    async def run(self, count: int) -> Findings:
        """Make `count` hostile calls and connections."""
        process = self._scene.children[self._service].process
        async with connected(self._scene.target(self._service)) as line:
            state = await self._scene.state()
            while self.findings.made < count and len(self.findings.wrong) < _ENOUGH:
                # What an operator may do comes last: it has effects that show later, elsewhere too.
                if self.findings.made < _MALFORMED * count:
                    state = await self._step(state, [self._malformed(line) for _ in range(_BATCH)])
                else:
                    state = await self._step(state, [self._well_formed(line)])
                if process.returncode is not None:
                    self.findings.wrong.append(f"the {self._service} ended with exit code {process.returncode}")
                    break
        self.findings.wrong += [f"it logged {line}" for line in self._scene.said if "unexpectedly" in line]
        return self.findings

    async def _step(self, before: dict[str, bytes], shots: list[Coroutine[Any, Any, str]]) -> dict[str, bytes]:
        """Make calls at once, and hold the state against that before if none of them may have changed it."""
        acted = [text for text in await asyncio.gather(*shots) if text]
        after = await self._scene.state()
        self._quiet = 0 if acted else self._quiet + 1
        if after != before and self._quiet > _QUIET:
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            self.findings.wrong.append(f"refused calls changed {', '.join(changed)}")
        if after != before:
            await self._scene.fill()
            after = await self._scene.state()
        return after

    async def _malformed(self, line: Line) -> str:
        """Make a call that is no message, or that its token does not allow; returns what may have acted."""
        rng, call = self._rng, self._rng.choice(self._calls)
        good = random_message(rng, call.request, rng.choice((RUN, RUN, OTHER_RUN, ""))).SerializeToString()
        tokens = self._scene.tokens
        if rng.random() < 0.05:
            self.findings.connections += 1
            data = wire.hostile_connection(rng, call.path, tokens.of(Role.READER), random_bytes(rng, good))
            await wire.send(self._scene.target(self._service), data)
            return ""
        count = rng.randint(0, 4) if call.streams_in else 1
        if rng.random() < 0.5 or self._scene.unlocked:
            messages = [random_bytes(rng, good) for _ in range(count)]
            return await self._shoot(line, _Shot(call, messages, tokens.all(Role.OPERATOR), False))
        messages = [rng.choice((good, random_bytes(rng, good))) for _ in range(count)]
        token, metadata = self._bad_token(call)
        return await self._shoot(line, _Shot(call, messages, token, True, metadata))

    def _bad_token(self, call: Call) -> tuple[str | None, tuple[tuple[str, str | bytes], ...]]:
        """A token that does not allow `call`, if there is one, or none, and other headers."""
        rng, tokens = self._rng, self._scene.tokens
        refused = [role for role in Role if role not in PERMISSIONS[call.path]]
        good = tokens.all(Role.OPERATOR)
        wrong = [None, "", "x", good[:-1], good + "x", good.upper(), "turnout..", "turnout.all-operator.", "é" * 10]
        wrong += [make for role in refused for make in (tokens.of(role), tokens.all(role))]
        token = rng.choice(wrong)
        if token is not None and not token.isascii():
            return None, (("authorization-bin", token.encode()), ("authorization", "Basic " + good))
        return token, rng.choice(((), (("x" * 50, "y" * 1000),), (("trace-bin", rng.randbytes(30)),)))

    async def _well_formed(self, line: Line) -> str:
        """Make a call of an operator, with values that make no sense; returns what may have acted."""
        rng, call = self._rng, self._rng.choice(self._calls)
        run = rng.choice((RUN, RUN, RUN, OTHER_RUN, "", "x" * 600))
        count = rng.randint(1, 3) if call.streams_in else 1
        messages = [random_message(rng, call.request, run).SerializeToString() for _ in range(count)]
        return await self._shoot(line, _Shot(call, messages, self._scene.tokens.all(Role.OPERATOR), False))

    async def _shoot(self, line: Line, shot: _Shot) -> str:
        code, details = await shot.call.code(
            line, shot.messages, shot.token, timeout=_DEADLINE_S, metadata=shot.metadata
        )
        self.findings.codes[code.name] += 1
        if code in _NEVER:
            self.findings.wrong.append(f"{code.name} ({details}): {shot.describe()}")
        if shot.refused and code not in _REFUSED:
            self.findings.wrong.append(f"not refused but {code.name} ({details}): {shot.describe()}")
        if code is Code.OK:
            self.findings.allowed += 1
        return shot.call.path if code is Code.OK or code in _CUT else ""


async def attack(scene: Scene, count: int, seed: int, report: Callable[[str], None], *services: str) -> list[Findings]:
    """Attack services one after the other; `report` gets a line for each."""
    found = []
    for service in services:
        found.append(await Attack(scene, service, seed).run(count))
        report(found[-1].line())
    return found
