"""`turnout up`: the three services on this machine, each in a process of its own.

Invariants: stdout carries one line per address and nothing else; if one service ends, all are stopped and the exit code
is 1; Ctrl-C and SIGTERM stop all in order, exit code 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.reference_engines import ReferenceEngines
from services.cli.running import run_async, until_stopped
from services.cli.targets import BUFFER, ENGINE, SCHEDULER
from services.processes.child import ChildFailed, ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from turnout.channels import Security
from turnout.client import ClientOptions, TurnoutError

_SERVICES: Final = ("buffer", "engine", "scheduler")
"""In the order of their starts; they stop the other way round, so that nobody misses a peer that is still needed."""


@click.command(
    help=with_examples(
        "Run the replay buffer, the engine controller and the switch scheduler on this machine, each in a process of "
        "its own, until Ctrl-C. What is not an option here is set by TURNOUT_BUFFER_*, TURNOUT_ENGINE_* and "
        "TURNOUT_SCHEDULER_* variables or a YAML file, as for the single services. With --reference come engines "
        "that follow every command and make up tokens: enough to write a trainer or a worker against, without a GPU.",
        "turnout up",
        "turnout up --buffer 127.0.0.1:0 --engine 127.0.0.1:0 --scheduler 127.0.0.1:0   free ports, printed",
        "turnout up --data-dir ./turnout-data          all three remember",
        "turnout up --run my-run --reference 1:1       with a hybrid and a standalone reference engine",
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
@click.option("--run", "run_id", metavar="RUN", help="With --reference: the run that the engines generate for.")
@click.option("--reference", metavar="HYBRID:STANDALONE", help="Run so many reference engines too, for --run.")
@click.option("--insecure", is_flag=True, help="Allow addresses that other machines can reach, without TLS and tokens.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def up(
    buffer: str,
    engine: str,
    scheduler: str,
    data_dir: Path | None,
    run_id: str | None,
    reference: str | None,
    insecure: bool,
    log_level: str,
    **security: str | None,
) -> None:
    """Run the three services."""
    engines = ReferenceEngines.parse(run_id, reference)
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
    options = ClientOptions()
    if engines:
        # First, so that it stops last: to the controller nothing dies.
        specs.insert(0, engines.spec(*common))
        options = _registering(security)
    run_async(_run(specs, engines, options))


def _registering(flags: Mapping[str, str | None]) -> ClientOptions:
    """How the engines are registered: over the TLS of the services, with the caller's own token.

    That of the services moves engines, and may not make any known.
    """
    own = Security.from_environment()
    if flags["tokens_file"] and not (own.token or own.token_file):
        raise click.UsageError("--reference with --tokens-file: name a trainer's token in TURNOUT_TOKEN_FILE")
    if flags["peer_ca"] or flags["peer_cert"]:
        own = replace(own, ca=flags["peer_ca"], cert=flags["peer_cert"], key=flags["peer_key"])
    return ClientOptions(security=own)


async def _run(specs: list[ChildSpec], engines: ReferenceEngines | None, options: ClientOptions) -> None:
    stop = asyncio.create_task(until_stopped())
    try:
        async with Fleet() as fleet:
            starting = asyncio.create_task(_start(fleet, specs, engines, options))
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            starting.result()
            await fleet.run(_until(stop))
    except ChildFailed as failed:
        raise CommandFailed(str(failed), failed.last_lines) from failed
    except TurnoutError as error:
        raise CommandFailed(f"the engines could not be registered: {error}") from error
    finally:
        stop.cancel()


async def _start(
    fleet: Fleet, specs: list[ChildSpec], engines: ReferenceEngines | None, options: ClientOptions
) -> None:
    children = await fleet.start_all(*specs, on_error_line=lambda line: click.echo(line, err=True))
    for child in children:
        for target in child.targets:
            click.echo(f"turnout {child.spec.name} listening on {target}")
    if engines:
        replicas = await engines.register(children, options)
        click.echo(f"turnout run {engines.run_id}: {', '.join(replicas)}")


async def _until(stop: asyncio.Task[None]) -> None:
    await asyncio.shield(stop)
