"""The programs of other languages against the same running services, and their ledgers beside Python's."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.clients_langs.python_job import ledger_of
from tests.clients_langs.toolchains import Built, build, need, run
from tests.clients_langs.world import Engines, OnStage, Service, Shared, engines, restarts, running, shared

LANGUAGES = ("typescript", "go")
PROGRAM_S = 240.0


async def play(
    built: Built, run_id: str, steps: int, common: Shared, own: Engines, on_stage: OnStage
) -> dict[str, Any]:
    """Run a program to its end and return its last line; `on_stage` hears the others."""
    process = await asyncio.create_subprocess_exec(
        *built.loop,
        *("--run", run_id, "--steps", str(steps), "--buffer", common.buffer.target),
        *("--engine", own.controller.target, "--scheduler", common.scheduler.target),
        cwd=built.cwd,
        env={**os.environ, **built.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PROGRAM_S):
            last: dict[str, Any] = {}
            async for raw in process.stdout:
                last = json.loads(raw)
                if "at" in last:
                    on_stage(last["at"], last["step"])
            assert await process.wait() == 0
        return last
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", LANGUAGES)
def test_h58_a_clients_own_tests_pass_against_a_live_buffer(language: str) -> None:
    """Numbers at their boundaries, enum values of a newer service, deadlines, error details, all kinds of streams."""
    built = build(language)

    async def check() -> None:
        service = Service("buffer")
        async with running(service):
            environment = {**built.environment, "TURNOUT_TEST_BUFFER": service.target}
            await asyncio.to_thread(run, built.tests, built.cwd, environment)

    asyncio.run(check())


@pytest.mark.timeout(1800)
@pytest.mark.slow
async def test_h57_programs_of_all_languages_survive_restarts_and_agree_with_python(tmp_path: Path) -> None:
    """Buffer and scheduler are killed in step 2 of each program, its controller in step 3; Python runs undisturbed."""
    steps = 4
    present = []
    for language in LANGUAGES:
        try:
            need(language)
            present.append(language)
        except pytest.skip.Exception as skipped:
            print(skipped)
    if not present:
        pytest.skip("no toolchain of another language is here; make test-clients installs them")
    ledgers: dict[str, dict[str, Any]] = {}
    programs = {language: await asyncio.to_thread(build, language) for language in present}
    async with shared(tmp_path) as common:
        async with engines(tmp_path, "python") as own:
            targets = (common.buffer.target, own.controller.target, common.scheduler.target)
            ledgers["python"] = await ledger_of("python", *targets, steps=steps)
        for language, built in programs.items():
            async with engines(tmp_path, language) as own:
                tasks: set[asyncio.Task[None]] = set()
                last = await play(built, language, steps, common, own, restarts(common, own, tasks))
                await asyncio.gather(*tasks)
                assert len(tasks) == 2
                ledger = last["ledger"]
                assert ledger.pop("restarted"), "the buffer did not restart while the program ran"
                assert last["outages"] > 0, "no generation was cut and continued"
                assert ledger.pop("lends") > 0
                ledgers[language] = ledger
    assert ledgers["python"]["committed"] == steps * 4
    for language in present:
        assert ledgers[language] == ledgers["python"], language
