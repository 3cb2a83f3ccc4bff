"""A machine of its own for the commands of a page: default ports, host names and folders as the pages name them.

It is a network and a mount namespace of this machine (Linux, root), so that `turnout up` listens where the quickstart
says, `trainer-0` is a name, and /mnt and /var/lib are empty, whatever else runs here.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.docs.pages import ROOT

HOSTS: Final = "localhost trainer trainer-0 trainer-node rollout-0 rollout-1 rollout-3 collector"
"""Names of the pages, all of which are this machine."""

_MAKE: Final = """
ip link set lo up
mount -t tmpfs tmpfs /mnt
mount -t tmpfs tmpfs /var/lib
mkdir -p /mnt/shared/payloads /var/lib/turnout
mount --bind "$1" /etc/hosts
echo made
exec sleep infinity
"""

LINKED: Final = ("examples", "node_modules", "clients", "protos", "deploy", "tests", "services", "Makefile")
"""What commands find beside them, as in a checkout."""


def unavailable() -> str | None:
    """Return why no place can be made here, if so."""
    tools = ("unshare", "nsenter", "ip", "mount")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"it needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "namespaces need root"


class Running:
    """A command that goes on beside others."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._output = b""

    def until(self, pattern: str, timeout: float) -> str:
        """Return what it printed, once that has the pattern. Fails if it ends or says nothing of the kind."""
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        ends = time.monotonic() + timeout
        while not re.search(pattern, self._output.decode(errors="replace")):
            ready, _, _ = select.select([number], [], [], max(0.0, ends - time.monotonic()))
            chunk = os.read(number, 1 << 16) if ready else b""
            assert chunk, f"{self._process.args!r} never printed {pattern!r}:\n{self._output.decode()[-4000:]}"
            self._output += chunk
        return self._output.decode(errors="replace")

    def ends(self, timeout: float) -> str:
        """Wait until it has ended well and return what it printed."""
        try:
            rest, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            raise
        printed = (self._output + rest).decode(errors="replace")
        assert self._process.returncode == 0, printed[-4000:]
        return printed

    def stop(self) -> int:
        """Press Ctrl-C and return its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        return self._process.returncode


class Place:
    """Runs commands as someone types them into a terminal in a checkout; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        hosts = directory / "hosts"
        hosts.write_text(f"127.0.0.1 {HOSTS}\n", encoding="utf-8")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "bash", "-euc", _MAKE, "place", str(hosts)], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"made\n"
        self._running: list[Running] = []
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        # Python's warnings are not a user's business here, and the width decides how tables break.
        self._environment = {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "COLUMNS": "120"}
        self._environment.pop("PYTHONPATH", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._running:
            one.stop()
        self._holder.kill()
        self._holder.communicate()

    def folder(self, name: str) -> Path:
        """Return a folder that looks like a checkout with its environment."""
        folder = self._directory / name
        folder.mkdir()
        (folder / ".venv").symlink_to(sys.prefix)
        for linked in LINKED:
            (folder / linked).symlink_to(ROOT / linked)
        return folder

    def run(
        self, command: str, folder: Path, timeout: float, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self._arguments(command, folder),
            env={**self._environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, command: str, folder: Path, environment: Mapping[str, str] | None = None) -> Running:
        """Run a command beside the others, until it is stopped or the place ends."""
        # `exec`, so that a signal reaches the command and not the shell before it.
        process = subprocess.Popen(
            self._arguments(re.sub(r"^((?:\w+=\S+ )*)", r"exec env \1", command, count=1), folder),
            env={**self._environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell lets its background jobs ignore SIGINT, and their children with them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        running = Running(process)
        self._running.append(running)
        return running

    def _arguments(self, command: str, folder: Path) -> list[str]:
        enter = ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", f"--wd={folder}"]
        return [*enter, "bash", "-euo", "pipefail", "-c", command]
