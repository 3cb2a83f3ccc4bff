"""`turnout ray up|status|down`: the services on the nodes of a Ray cluster.

Invariants: everything is done by `turnout.ray`, which a trainer can call itself; stdout carries results alone; exit
code 2 for a file that cannot be used, 1 for a cluster that does not do what is asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

from services.cli.examples import with_examples
from services.cli.failures import EXIT_FAILED, CommandFailed, Misconfigured
from turnout import ray as deployments

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NAME: Final = "turnout"


@click.group(
    "ray",
    help=with_examples(
        "Run the replay buffer, the switch scheduler and the engine controller on the trainer's node of a Ray cluster, "
        "and an engine agent on every rollout and hybrid node. Each is the child process of a detached actor that Ray "
        "starts again, so nothing depends on the command or the job that started it.",
        "turnout ray up cluster.yaml",
        "turnout ray status",
        "turnout ray down",
    ),
    no_args_is_help=True,
)
def ray_group() -> None:
    """Hold the commands."""


def _address_option(command: F) -> F:
    return click.option(
        "--address",
        metavar="HOST:PORT",
        default=lambda: os.environ.get("RAY_ADDRESS", "auto"),
        show_default="RAY_ADDRESS, else the cluster of this machine",
        help="The Ray cluster to join.",
    )(command)


def _name_option(command: F) -> F:
    return click.option(
        "--name", default=_NAME, show_default=True, help="Name of the deployment, as its file says it."
    )(command)


def _asked(work: Callable[[], T]) -> T:
    try:
        return work()
    except deployments.DeploymentError as error:
        raise CommandFailed(error.problems[0], error.problems[1:]) from error


@ray_group.command(
    help=with_examples(
        "Start what FILE describes, wait until all of it serves, and print one line per service. A file with comments "
        "is deploy/ray/cluster.yaml in the repository. Each of its nodes needs turnout-services in the environment of "
        "its Ray workers. What runs already as described is left alone; if something does not start, what this command "
        "started is ended again.",
        "turnout ray up cluster.yaml",
        "turnout ray up cluster.yaml --address 10.0.0.5:6379 --json",
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_address_option
@click.option(
    "--timeout",
    type=click.FloatRange(1.0, 86_400.0),
    default=300.0,
    show_default=True,
    help="Seconds in which everything has to serve; engines load their models in them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def up(file: Path, address: str, timeout: float, as_json: bool) -> None:
    """Start a deployment."""
    try:
        spec = deployments.load(file)
    except deployments.DeploymentError as error:
        raise Misconfigured(error.problems[0], error.problems[1:]) from error
    made = _asked(lambda: deployments.up(spec, address=address, ready_within_s=timeout))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(made)))
        return
    services = {"buffer": made.buffer, "engine": made.engine, "scheduler": made.scheduler}
    for name, target in (services | made.agents).items():
        click.echo(f"turnout {name} listening on {target}")


@ray_group.command(
    help=with_examples(
        "Show every process of a deployment: where it serves, how often it was started, and what is wrong with it. "
        "Exit code 1 if anything is. 'turnout status' with these addresses shows the runs.",
        "turnout ray status",
        "turnout ray status --name my-deployment --json",
    )
)
@_name_option
@_address_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(name: str, address: str, as_json: bool) -> None:
    """Print how a deployment is."""
    statuses = _asked(lambda: deployments.status(name, address=address))
    if as_json:
        click.echo(json.dumps({"members": [dataclasses.asdict(one) for one in statuses]}))
    else:
        Console(highlight=False).print(_table(statuses))
    if any(one.problem for one in statuses):
        click.get_current_context().exit(EXIT_FAILED)


@ray_group.command(
    help=with_examples(
        "End a deployment in order, agents first. Data directories stay: 'turnout ray up' goes on with them.",
        "turnout ray down",
        "turnout ray down --name my-deployment",
    )
)
@_name_option
@_address_option
def down(name: str, address: str) -> None:
    """End a deployment."""
    for ended in _asked(lambda: deployments.down(name, address=address)):
        click.echo(f"turnout {ended} ended")


def _table(statuses: list[deployments.MemberStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("member", "serves on", "pid", "starts", "problem"):
        table.add_column(title, overflow="fold")
    for one in statuses:
        state = one.state
        known = ("-", "-", "-") if state is None else (state.target or "-", str(state.pid or "-"), str(state.starts))
        table.add_row(one.name, *known, one.problem or "-")
    return table
