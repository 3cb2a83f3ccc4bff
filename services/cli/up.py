"""`turnout up`: the three services on this machine, each in a process of its own.

Invariants: stdout carries one line per address and nothing else; if one service ends, all are stopped and the exit code
is 1; Ctrl-C and SIGTERM stop all in order, exit code 0.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async, until_stopped
from services.cli.targets import BUFFER, ENGINE, SCHEDULER
from services.processes.child import ChildFailed, ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec

_SERVICES: Final = ("buffer", "engine", "scheduler")
"""In the order of their starts; they stop the other way round, so that nobody misses a peer that is still needed."""


@click.command(
    help=with_examples(
        "Run the replay buffer, the engine controller and the switch scheduler on this machine, each in a process of "
        "its own, until Ctrl-C. What is not an option here is set by TURNOUT_BUFFER_*, TURNOUT_ENGINE_* and "
        "TURNOUT_SCHEDULER_* variables or a YAML file, as for the single services.",
        "turnout up",
        "turnout up --buffer 127.0.0.1:0 --engine 127.0.0.1:0 --scheduler 127.0.0.1:0   free ports, printed",
        "turnout up --data-dir ./turnout-data          all three remember",
        "turnout up --buffer unix:/tmp/turnout-buffer.sock",
    )
)
@click.option("--buffer", metavar="ADDRESS", default=BUFFER, show_default=True, help="Where the buffer listens.")
@click.option("--engine", metavar="ADDRESS", default=ENGINE, show_default=True, help="Where the controller listens.")
@click.option(
    "--scheduler", metavar="ADDRESS", default=SCHEDULER, show_default=True, help="Where the scheduler listens."
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep what the services know in this directory, one folder each, so that all three survive a restart. Without "
    "it everything ends with the processes.",
)
@click.option("--tls-cert", metavar="FILE", help="The services' certificate (PEM); they are then called over TLS.")
@click.option("--tls-key", metavar="FILE", help="Its private key.")
@click.option("--tls-client-ca", metavar="FILE", help="Authorities that callers need a certificate of (mutual TLS).")
@click.option("--tokens-file", metavar="FILE", help="The tokens that callers need; see 'turnout token new'.")
@click.option("--peer-ca", metavar="FILE", help="Authorities that vouch for the services when these call each other.")
@click.option("--peer-cert", metavar="FILE", help="The certificate that they show each other, for mutual TLS.")
@click.option("--peer-key", metavar="FILE", help="Its private key.")
@click.option("--peer-token-file", metavar="FILE", help="File with the token that they show each other.")
@click.option("--insecure", is_flag=True, help="Allow addresses that other machines can reach, without TLS and tokens.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def up(
    buffer: str,
    engine: str,
    scheduler: str,
    data_dir: Path | None,
    insecure: bool,
    log_level: str,
    **security: str | None,
) -> None:
    """Run the three services."""
    common = ["--log-level", log_level, *(("--insecure",) if insecure else ())]
    peers: list[str] = []
    for option, value in security.items():
        if value is not None:
            flags = peers if option.startswith("peer_") else common
            flags += [f"--{option.replace('_', '-')}", value]
    addresses = {"buffer": buffer, "engine": engine, "scheduler": scheduler}
    kept = {name: () if data_dir is None else ("--data-dir", str(data_dir.absolute() / name)) for name in _SERVICES}
    # The buffer calls nobody.
    calling: dict[str, list[str]] = {"buffer": [], "engine": peers, "scheduler": peers}
    specs = [
        service_spec(name, "--listen", addresses[name], *kept[name], *common, *calling[name]) for name in _SERVICES
    ]
    run_async(_run(specs))


async def _run(specs: list[ChildSpec]) -> None:
    stop = asyncio.create_task(until_stopped())
    try:
        async with Fleet() as fleet:
            starting = asyncio.create_task(_start(fleet, specs))
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            starting.result()
            await fleet.run(_until(stop))
    except ChildFailed as failed:
        raise CommandFailed(str(failed), failed.last_lines) from failed
    finally:
        stop.cancel()


async def _start(fleet: Fleet, specs: list[ChildSpec]) -> None:
    children = await fleet.start_all(*specs, on_error_line=lambda line: click.echo(line, err=True))
    for child in children:
        for target in child.targets:
            click.echo(f"turnout {child.spec.name} listening on {target}")


async def _until(stop: asyncio.Task[None]) -> None:
    await asyncio.shield(stop)
