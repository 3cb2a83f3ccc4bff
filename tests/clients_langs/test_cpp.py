"""The stubs in C++ build, and a smoke program waits and samples."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from tests.clients_langs.toolchains import build_smoke
from tests.clients_langs.world import Service, running


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_h58_the_smoke_program_in_cpp_waits_samples_and_keeps_its_numbers() -> None:
    """A C++ data plane: boundary numbers, newer enum values, error details, streams both ways, payload bytes."""
    program = build_smoke()

    async def check() -> str:
        service = Service("buffer")
        async with running(service):
            done = await asyncio.to_thread(
                subprocess.run,
                [str(program), service.target, "cpp"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout

    ledger = json.loads(asyncio.run(check()))
    assert ledger["added"] == ledger["committed"] == "4"
    assert "evicted" not in ledger, "a count of zero is left out of JSON"
