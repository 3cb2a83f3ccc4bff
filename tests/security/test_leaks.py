"""Where a token must not turn up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.runtime.permissions import Role
from tests.security.houses import Tokens


def _command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            # It has ended since.
            continue
    return lines


async def _listed(child: Child, command: str) -> list[str]:
    """What the process list says once `command` is in it: a new process has no command line for a moment."""
    while True:
        running = _command_lines()
        if any(command in line for line in running):
            return running
        assert not child.ended.done(), "it ended before it was in the process list"
        await asyncio.sleep(0)


async def test_tokens_stand_in_no_log_and_no_process_list(tmp_path: Path) -> None:
    """Logs are shipped and read by many, and `ps` by everyone on the machine."""
    tokens = Tokens(tmp_path / "tokens.yaml")
    tokens.write()
    good, wrong = tokens.all(Role.READER), "turnout.all-reader.wrong-secret"
    said: list[str] = []
    arguments = ("buffer", "serve", "--listen", "127.0.0.1:0", "--log-level", "debug", "--tokens-file")
    async with Fleet(grace_s=10) as fleet:
        spec = ChildSpec("buffer", "services.cli.main", (*arguments, str(tokens.path)))
        (buffer,) = await fleet.start_all(spec, on_error_line=said.append)
        where = ("--buffer", buffer.targets[0], "--engine", "unix:/none", "--scheduler", "unix:/none")
        for token, reason in ((good, ""), (wrong, "TOKEN_UNKNOWN")):
            status = ChildSpec(
                "status", "services.cli.main", ("status", "--json", *where), None, {"TURNOUT_TOKEN": token}
            )
            problem = "DEADLINE_EXCEEDED"
            while "DEADLINE_EXCEEDED" in problem:
                shown: list[str] = []
                child = await Child.start(status, on_line=shown.append, on_error_line=said.append)
                running = await _listed(child, "services.cli.main status")
                await child.ended
                said += [*running, *shown]
                services = {service["service"]: service["problem"] for service in json.loads(shown[0])["services"]}
                problem = services["buffer"]
            assert reason in problem
            assert bool(problem) == bool(reason)
    text = "\n".join(said)
    assert "tokens.yaml" in text
    for secret in (good, wrong, good.rpartition(".")[2], "wrong-secret"):
        assert secret not in text
