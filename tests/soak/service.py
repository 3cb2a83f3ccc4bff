"""The buffer as a process: started again whenever it ends, as systemd would, on the same data directory.

Invariants: the proxy leads to the present life and to none in between; an end that nobody asked for, an exit code after
SIGTERM other than 0, and a log line that tells of a fault are kept as faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from services.processes.child import Child, ChildFailed
from services.processes.service import service_spec
from tests.soak.disk import Disk
from tests.soak.proxy import ChaosProxy
from tests.soak.shifted import shift_of

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 60.0
STOP_S: Final = 30.0
"""SIGTERM to the end: the grace of the service and what a busy machine adds."""

PAYLOAD_MEMORY: Final = 8 * 1024 * 1024
"""A small read cache: filling the usual one takes longer than a soak, and looks like a leak."""

_AGAIN_S: Final = 0.5


class Service:
    """The lives of one buffer."""

    def __init__(
        self, data_dir: Path, disk: Disk, durability: str, proxy: ChaosProxy, log: Path, rng: random.Random
    ) -> None:
        self.lives = 0
        self.shifts = 0
        """Lives whose monotonic clock was not that of the machine."""
        self.killed = 0
        self.stopped = 0
        self.target = ""
        """Where the present life listens."""
        self.ready_at: list[float] = []
        self.started_in: list[float] = []
        """Seconds from the start of a process to its ready line."""
        self.faults: list[str] = []
        self.errors: list[str] = []
        """What it logged as an error; the disk being full explains some."""
        self.refused_starts = 0
        """Starts that ended at once while the disk was full."""
        self._disk = disk
        self._rng = rng
        self._proxy = proxy
        self._log = log.open("a", encoding="utf-8")
        self._arguments = (
            *("--listen", "127.0.0.1:0", "--data-dir", str(data_dir), "--durability", durability),
            *("--log-format", "json", "--payload-memory", str(PAYLOAD_MEMORY)),
        )
        self._child: Child | None = None
        self._asked = False
        self._over = False
        self._stopping = False
        self._starting = self._was_full = False

    async def start(self) -> None:
        """Begin a life; raises ChildFailed."""
        begun = time.monotonic()
        self._starting, self._was_full = True, self._disk.full
        # Down to shortly after a boot, and up to a month.
        shift = self._rng.randrange(-int(0.9 * begun), 30 * 86_400)
        spec = service_spec("buffer", *self._arguments)
        spec = replace(
            spec,
            module="tests.soak.shifted",
            arguments=(str(shift), spec.module, *spec.arguments),
            environment={"PYTHONPATH": str(ROOT)},
        )
        child = await Child.start(spec, on_error_line=self._line)
        self._child, self._asked = child, False
        await child.ready(START_S)
        self._starting = False
        self.lives += 1
        self.shifts += shift_of(child.process.pid) != 0
        self.target = child.target
        self.ready_at.append(time.monotonic())
        self.started_in.append(self.ready_at[-1] - begun)
        self._proxy.upstream = child.target

    async def run(self) -> None:
        """Start it again for ever."""
        while True:
            child = self._child
            assert child is not None
            code = await asyncio.shield(child.ended)
            self._proxy.upstream = None
            if self._over:
                return
            if not self._asked:
                self.faults.append(f"the service ended by itself with {code}: {_end_of(child.last_lines)}")
            await asyncio.sleep(_AGAIN_S)
            while True:
                try:
                    await self.start()
                    break
                except ChildFailed as failure:
                    if self._was_full or self._disk.full:
                        self.refused_starts += 1
                    else:
                        self.faults.append(f"the service did not start: {failure}: {_end_of(failure.last_lines)}")
                    if self._child is not None:
                        await self._child.stop(0)
                    await asyncio.sleep(2 * _AGAIN_S)

    @property
    def ready(self) -> bool:
        """Whether a life is being served."""
        return self._proxy.upstream is not None

    def kill(self) -> None:
        """kill -9."""
        if self._child is not None and self.ready and not self._stopping:
            self._asked = True
            self.killed += 1
            self._proxy.upstream = None
            with contextlib.suppress(ProcessLookupError):
                self._child.process.send_signal(signal.SIGKILL)

    async def stop(self, *, for_good: bool) -> None:
        """SIGTERM, and see to it that the exit code is 0."""
        child = self._child
        if child is None or child.ended.done():
            return
        self._asked = self._stopping = True
        self._over = for_good
        self.stopped += 1
        try:
            code = await child.stop(STOP_S)
        finally:
            self._stopping = False
        if code == -signal.SIGKILL:
            self.faults.append(f"it did not end within {STOP_S:g} s of SIGTERM")
        elif code != 0:
            self.faults.append(f"after SIGTERM the exit code was {code}")

    async def close(self) -> None:
        """End it, whatever it does."""
        self._over = True
        if self._child is not None:
            await self._child.stop(0)
        self._log.close()

    @property
    def resident_bytes(self) -> int | None:
        """Memory of the present life; None between two."""
        if self._child is None or not self.ready:
            return None
        try:
            pages = Path(f"/proc/{self._child.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _line(self, line: str) -> None:
        self._log.write(line + "\n")
        self._log.flush()
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            # Not a log line: why it does not start, which ChildFailed tells too, or what Python prints at its end.
            if self._starting and "Traceback" not in line:
                return
            self.faults.append(f"the service wrote {line!r}")
            return
        level = entry.get("level", "")
        text = json.dumps(entry)
        if "Traceback" in text or "exception" in entry or '"UNKNOWN"' in text or '"INTERNAL"' in text:
            self.faults.append(f"the service logged {text[:1500]}")
        elif level in ("error", "critical"):
            self.errors.append(text[:300])


def _end_of(lines: Iterable[str]) -> str:
    return " | ".join(list(lines)[-3:])
