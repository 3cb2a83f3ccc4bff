"""A Prometheus of the tests' own: where it is, how it is started, and what it answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".prometheus" / "usr" / "bin"
"""Where `make test-deploy` unpacks Debian's package."""

_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
_STOP_S = 10.0


def need(program: str) -> str:
    """The path of `prometheus` or `promtool`; skips where there is none."""
    found = shutil.which(program, path=str(UNPACKED)) or shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not here; make test-deploy fetches it")
    return found


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ask(self, path: str, **arguments: str) -> Any:
        """The data that an API call answers."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        return (await asyncio.to_thread(_get, url))["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that a query gives now."""
        series: list[dict[str, Any]] = (await self.ask("query", query=expression))["result"]
        return series


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def _is_ready(url: str) -> bool:
    """Whether it answers queries: it listens before it has read what it keeps."""
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=20) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError:
        return False


@asynccontextmanager
async def prometheus(config: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Run one with this configuration, its data in `folder`."""
    (folder / "prometheus.yml").write_text(config)
    process = await asyncio.create_subprocess_exec(
        need("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(30):
            while not (found := _LISTENING.search(line := (await process.stderr.readline()).decode())):
                lines.append(line)
                assert line, "".join(lines)
        reading = asyncio.create_task(process.stderr.read())
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(_is_ready, f"http://{found[1]}"):  # noqa: ASYNC110 - it has to be asked
                await asyncio.sleep(0.1)
        yield Prometheus(f"http://{found[1]}")
        process.terminate()
        async with asyncio.timeout(_STOP_S):
            await process.wait()
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
