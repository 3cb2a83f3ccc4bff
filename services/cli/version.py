"""`turnout version`: of packages, and of what the services write."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Final

import click

from services.buffer.storage.schema import SCHEMA as BUFFER
from services.cli.examples import with_examples
from services.engine.storage.schema import SCHEMA as ENGINE
from services.scheduler.storage.schema import SCHEMA as SCHEDULER

_DISTRIBUTIONS: Final = ("turnout-services", "turnout", "grpcio", "protobuf")
_JOURNALS: Final = [BUFFER, ENGINE, SCHEDULER]


@click.command(
    help=with_examples(
        "Print the versions of Turnout and of what it stands on, and the formats of the journals that this release "
        "reads and writes; 'turnout doctor --data-dir DIR' tells that of a journal.",
        "turnout version --json",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print versions."""
    versions = {name: metadata.version(name) for name in _DISTRIBUTIONS} | {"python": platform.python_version()}
    if as_json:
        click.echo(json.dumps(versions | {"journals": _JOURNALS}))
        return
    versions["journals"] = ", ".join(_JOURNALS)
    for name, number in versions.items():
        click.echo(f"{name:<17} {number}")
