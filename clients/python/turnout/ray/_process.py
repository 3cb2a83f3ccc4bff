"""The process of a service, as the child of an actor.

Invariants: it ends when the thread that started it does, so a killed actor leaves no service behind; nothing of the
user's can take the place of our package `services` in it; both pipes are read until they close.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

KEPT_LINES: Final = 40
"""Enough for a traceback and what led to it."""

_LISTENING: Final = re.compile(r"^turnout \S+ listening on (?P<target>\S+)$")
"""What a service prints once it serves."""


def command(service: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of `turnout SERVICE serve`, tied to the life of its parent."""
    return [
        sys.executable,
        "-P",  # the current directory may hold a folder `services`
        "-m",
        "services.processes.leash",
        "services.cli.main",
        service,
        "serve",
        *arguments,
    ]


def environment(ours: Mapping[str, str], added: Mapping[str, str], *, keep_gpus: bool) -> dict[str, str]:
    """Return the variables of the child.

    Ray puts a job's working directory on PYTHONPATH; an entry with another package `services` is left out. An actor
    without GPUs of Ray's sees none; unless `keep_gpus`, the child sees those of the machine.
    """
    made = dict(ours)
    if "PYTHONPATH" in made:
        kept = [entry for entry in made["PYTHONPATH"].split(os.pathsep) if not _shadows(Path(entry))]
        made["PYTHONPATH"] = os.pathsep.join(kept)
        if not kept:
            del made["PYTHONPATH"]
    if not keep_gpus and not made.get("CUDA_VISIBLE_DEVICES", "-"):
        del made["CUDA_VISIBLE_DEVICES"]
    return {**made, **added}


def _shadows(entry: Path) -> bool:
    package = entry / "services"
    return (package.is_dir() or (entry / "services.py").exists()) and not (package / "processes/leash.py").exists()


class ServiceProcess:
    """One life of the process."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.target = ""
        """Where it listens, once it serves."""
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The end of what it wrote to stderr."""
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=dict(variables),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self) -> int:
        """Return its exit code, once it has ended and all it wrote was read."""
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        return code

    def stop(self, grace_s: float) -> None:
        """Ask it to end, and insist after `grace_s` wall seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                found = _LISTENING.match(line.rstrip())
                if found and not self.target:
                    self.target = found["target"]

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.last_lines.append(line.rstrip())
                # Into the log that Ray keeps of the actor.
                print(line, end="", file=sys.stderr, flush=True)
