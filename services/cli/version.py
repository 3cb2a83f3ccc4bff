"""`turnout version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Final

import click

from services.cli.examples import with_examples

_DISTRIBUTIONS: Final = ("turnout-services", "turnout", "grpcio", "protobuf")


@click.command(
    help=with_examples("Print the versions of Turnout and of what it stands on.", "turnout version --json"),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print versions."""
    versions = {name: metadata.version(name) for name in _DISTRIBUTIONS} | {"python": platform.python_version()}
    if as_json:
        click.echo(json.dumps(versions))
        return
    for name, number in versions.items():
        click.echo(f"{name:<17} {number}")
