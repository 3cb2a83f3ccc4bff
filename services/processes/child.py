"""One child process: its start, its ready line, its last words and its end.

Invariants: both pipes are read until they close, so a child never blocks on a full pipe; its last lines of stderr are
kept for whoever has to explain its end; `stop` returns only when the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

KEPT_LINES: Final = 40
"""Enough for a traceback and what led to it, little enough to print."""

LINE_LIMIT_BYTES: Final = 8 * 2**20
"""A line of a child's report holds at most one mini-batch with its trajectories; this is a hundred times that."""

LISTENING: Final = re.compile(r"^turnout \S+ listening on (?P<target>\S+)$")
"""What a service prints for each address once it is ready."""

OnLine = Callable[[str], None]


class ChildFailed(Exception):
    """A child ended, or did not become ready, when it should not have."""

    def __init__(self, name: str, what: str, last_lines: list[str]) -> None:
        super().__init__(f"{name} {what}")
        self.name = name
        self.what = what
        self.last_lines = last_lines
        """The end of what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start: a Python module of ours with its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    ready: re.Pattern[str] | None = LISTENING
    """Line of stdout that says the child is ready; None: it is ready once started."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables added to, or in place of, our own; None: not handed on."""

    ready_lines: int = 1
    """How many such lines there will be: a service prints one per address."""


class Child:
    """A running child. Made by `Child.start`."""

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        on_line: OnLine | None,
        on_error_line: OnLine | None,
    ) -> None:
        self.spec = spec
        self.process = process
        self.targets: list[str] = []
        """What the ready lines named, in order."""

        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_line = on_line
        self._on_error_line = on_error_line
        self._ready = asyncio.Event()
        self._readers = [
            asyncio.create_task(self._read_stdout(), name=f"stdout of {spec.name}"),
            asyncio.create_task(self._read_stderr(), name=f"stderr of {spec.name}"),
        ]
        self.ended = asyncio.create_task(self._wait(), name=f"end of {spec.name}")
        if spec.ready is None:
            self._ready.set()

    @classmethod
    async def start(
        cls, spec: ChildSpec, *, on_line: OnLine | None = None, on_error_line: OnLine | None = None
    ) -> Child:
        """Start the process. `on_line` gets each line of stdout, `on_error_line` each of stderr."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # "services" is a common name: nothing in the current directory may take its place
            "-m",
            "services.processes.leash",
            spec.module,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in {**os.environ, **spec.environment}.items() if value is not None},
            limit=LINE_LIMIT_BYTES,
            # A session of its own: Ctrl-C on the terminal reaches us alone, and we stop the children in order.
            start_new_session=True,
        )
        return cls(spec, process, on_line, on_error_line)

    @property
    def target(self) -> str:
        """The first address it listens on."""
        return self.targets[0]

    async def ready(self, timeout_s: float) -> None:
        """Wait until it said that it is ready; raises ChildFailed if it ends or stays silent."""
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({waiting, self.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._ready.is_set():
            return
        if self.ended.done():
            raise self.failure()
        raise ChildFailed(self.spec.name, f"was not ready within {timeout_s:g} s", list(self.last_lines))

    def failure(self) -> ChildFailed:
        """Say how it ended, with its last lines."""
        code = self.ended.result()
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ChildFailed(self.spec.name, what, list(self.last_lines))

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, insist after `grace_s`, and return its exit code."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            await asyncio.wait({self.ended}, timeout=grace_s)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        return await self.ended

    async def _wait(self) -> int:
        code = await self.process.wait()
        await asyncio.gather(*self._readers)
        return code

    async def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if not self._ready.is_set() and self.spec.ready is not None and (found := self.spec.ready.match(line)):
                self.targets.append(found.groupdict().get("target", ""))
                if len(self.targets) >= self.spec.ready_lines:
                    self._ready.set()
            elif self._on_line is not None:
                self._on_line(line)

    async def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self.last_lines.append(line)
            if self._on_error_line is not None:
                self._on_error_line(line)
