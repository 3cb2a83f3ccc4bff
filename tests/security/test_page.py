"""docs/security.md does what it says."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.processes.child import ChildSpec
from services.processes.fleet import Fleet
from tools.permissions import PAGE, page

_MAKING = 2
"""Blocks before the one that starts the services."""


def test_the_table_of_the_page_is_that_of_the_services() -> None:
    """Whoever hands out tokens goes by the page."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python3 -m tools.permissions"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_ten_minutes_of_the_page_work(tmp_path: Path) -> None:
    """Certificates that a library refuses, or a flag that is misspelt, cost an afternoon."""
    if shutil.which("openssl") is None or shutil.which("curl") is None:
        pytest.skip("openssl or curl is not there")
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    made, starting, asking = blocks[:_MAKING], blocks[_MAKING], blocks[_MAKING + 1 :]
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "no_proxy": "localhost,127.0.0.1"}

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for block in made:
        await asyncio.to_thread(shell, block)
    words = starting.split()
    assert words[:2] == ["turnout", "up"]
    # Free ports, and files where they are: the process starts in another directory.
    words = [re.sub(r"^(0\.0\.0\.0|127\.0\.0\.1):\d+$", r"\1:0", word) for word in words[1:]]
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    async with Fleet(grace_s=10) as fleet:
        (up,) = await fleet.start_all(ChildSpec("up", "services.cli.main", tuple(words), ready_lines=3))
        buffer, engine, scheduler = (f"localhost:{target.rpartition(':')[2]}" for target in up.targets)
        environment |= {
            "TURNOUT_TARGET_BUFFER": buffer,
            "TURNOUT_TARGET_ENGINE": engine,
            "TURNOUT_TARGET_SCHEDULER": scheduler,
        }
        status, curl = asking
        assert "no runs" in await asyncio.to_thread(shell, status)
        assert "grpc-status: 0" in await asyncio.to_thread(shell, curl.replace("localhost:50053", scheduler))
