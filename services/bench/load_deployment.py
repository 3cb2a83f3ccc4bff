"""What the load bench runs against: the services as they are deployed.

Invariants: each service is a process of its own with a data directory; over TLS each caller has a token of its role
that is good for its run alone, and the services call each other with one of theirs; a controller serves one run, so
each run has one, with an agent of one hybrid and one standalone reference replica.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from services.bench.load_plan import Access, Plan
from services.bench.load_process import Errors
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.processes.registering import register_agent
from services.processes.service import service_spec
from services.runtime.permissions import Role
from services.runtime.tokens import SECRET_BYTES, digest, make_token
from turnout.client import AsyncEngineClient

_LISTEN: Final = ("--listen", "127.0.0.1:0", "--log-level", "warning")
_HERE: Final = "127.0.0.1"


class NoCertificate(Exception):
    """The machine has no openssl; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The running services."""

    fleet: Fleet
    buffer: Child
    scheduler: Child
    engines: list[Child]
    """A controller for each run."""
    bare: Child
    access: Access

    @property
    def pids(self) -> dict[str, list[int]]:
        """Processes by service; the controllers together."""
        services = {"buffer": [self.buffer], "scheduler": [self.scheduler], "engine": self.engines, "bare": [self.bare]}
        return {name: [child.process.pid for child in children] for name, children in services.items()}


@asynccontextmanager
async def deploy(plan: Plan, directory: Path, errors: Errors, *, secure: bool) -> AsyncIterator[Deployment]:
    """Run the services with their files in `directory`. What they log at warning or above are errors.

    Raises ChildFailed, NoCertificate, TurnoutError.
    """
    tokens = _issue_tokens(plan, directory) if secure else {}
    flags: list[str] = []
    peers: list[str] = []
    ca = await _certificate(directory) if secure else None
    if ca is not None:
        flags = ["--tls-cert", ca, "--tls-key", str(directory / "server.key")]
        flags += ["--tokens-file", str(directory / "tokens.yaml")]
        peers = ["--peer-ca", ca, "--peer-token-file", tokens["service"]]

    def spec(service: str, name: str, *more: str) -> ChildSpec:
        kept = ("--data-dir", str(directory / name))
        return service_spec(service, *_LISTEN, *kept, *flags, *more, name=name)

    def agent(run_id: str) -> ChildSpec:
        replicas = ("--replica", "hybrid-0:hybrid", "--replica", "standalone-0:standalone")
        model = ("--no-replica-weights", "--weights-bytes", str(1 << 20))
        return service_spec("engine", "--agent", *_LISTEN, *model, *replicas, *flags, name=f"agent {run_id}")

    async with Fleet() as fleet:
        children = await fleet.start_all(
            spec("buffer", "buffer"),
            spec("scheduler", "scheduler", *peers),
            ChildSpec("bare", "services.bench.bare_buffer", (str(directory),)),
            *(spec("engine", f"engine {run_id}", *peers) for run_id in plan.run_ids),
            *(agent(run_id) for run_id in plan.run_ids),
            on_error_line=lambda line: errors.add(f"a service logged: {line}"),
        )
        (buffer, scheduler, bare), rest = children[:3], children[3:]
        engines, agents = rest[: plan.runs], rest[plan.runs :]
        targets = {run_id: engine.target for run_id, engine in zip(plan.run_ids, engines, strict=True)}
        access = Access(buffer.target, scheduler.target, bare.target, targets, tokens, ca)
        for run_id, child in zip(plan.run_ids, agents, strict=True):
            options = access.options(f"trainer/{run_id}")
            async with AsyncEngineClient(targets[run_id], options) as client:
                await register_agent(client, child.target, run_id, {}, options)
        yield Deployment(fleet, buffer, scheduler, engines, bare, access)


def _issue_tokens(plan: Plan, directory: Path) -> dict[str, str]:
    """Write the tokens and the file that the services know them by; returns their files."""
    wanted: list[tuple[str, Role, str | None]] = [("reader", Role.READER, None), ("service", Role.SERVICE, None)]
    for run_id in plan.run_ids:
        wanted += [(f"trainer/{run_id}", Role.TRAINER, run_id), (f"worker/{run_id}", Role.WORKER, run_id)]
    lines: list[dict[str, object]] = []
    files: dict[str, str] = {}
    for name, role, run in wanted:
        token_id = name.replace("/", "-")
        token = make_token(token_id, secrets.token_urlsafe(SECRET_BYTES))
        file = directory / f"{token_id}.token"
        file.touch(mode=0o600)
        file.write_text(token)
        files[name] = str(file)
        scope: dict[str, object] = {"all_runs": True} if run is None else {"run": run}
        lines.append({"id": token_id, "role": role.value, **scope, "sha256": digest(token).hex()})
    (directory / "tokens.yaml").write_text(yaml.safe_dump(lines))
    return files


async def _certificate(directory: Path) -> str:
    """Make a certificate that vouches for itself; returns its file. Raises NoCertificate."""
    cert, key = str(directory / "server.pem"), str(directory / "server.key")
    try:
        process = await asyncio.create_subprocess_exec(
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"),
            *("-days", "2", "-subj", "/CN=turnout-load", "-addext", f"subjectAltName=IP:{_HERE}"),
            *("-keyout", key, "-out", cert),
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise NoCertificate("openssl is not there to make a certificate; measure without TLS: --open") from None
    _, said = await process.communicate()
    if process.returncode:
        raise NoCertificate(f"openssl made no certificate: {said.decode(errors='replace').strip()}")
    return cert
