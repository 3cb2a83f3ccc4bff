"""The programs of other languages against the same running services, and their ledgers beside Python's."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.runtime.permissions import Role
from tests.clients_langs.python_job import ledger_of
from tests.clients_langs.toolchains import Built, build, need, run
from tests.clients_langs.world import Engines, OnStage, Service, Shared, engines, restarts, running, shared
from tests.runtime.certificates import Authority
from tests.security.houses import Tokens

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


def locks(directory: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags of a buffer with mutual TLS and tokens, and the environment of those who may call it."""
    authority, tokens = Authority(directory / "tls"), Tokens(directory / "tokens.yaml")
    cert, key = authority.issue("server", "buffer.turnout.internal")
    own_cert, own_key = authority.issue("client", "client")
    held = directory / "operator.token"
    held.write_text(tokens.all(Role.OPERATOR))
    serving = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": authority.ca, "--tokens-file": tokens.write()}
    calling = {"CA": authority.ca, "CERT": own_cert, "KEY": own_key, "TOKEN_FILE": held}
    environment = {f"TURNOUT_{name}": str(value) for name, value in calling.items()}
    environment["TURNOUT_SERVER_NAME"] = "buffer.turnout.internal"
    return tuple(str(part) for flag in serving.items() for part in flag), environment


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "locked", [pytest.param(False, id="open"), pytest.param(True, id="locked", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("language", LANGUAGES)
def test_h58_a_clients_own_tests_pass_against_a_live_buffer(language: str, locked: bool, tmp_path: Path) -> None:
    """Numbers at their boundaries, enum values of a newer service, deadlines, error details, all kinds of streams.

    Behind mutual TLS and a token they must be the same.
    """
    built = build(language)
    serving, calling = locks(tmp_path) if locked else ((), {})

    async def check() -> None:
        service = Service("buffer", *serving)
        async with running(service):
            environment = {**built.environment, "TURNOUT_TEST_BUFFER": service.target, **calling}
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
