"""`turnout doctor`: what is wrong around the services, and what to do about it.

Invariants: it changes nothing; a target that was named has to answer, one of the defaults may be free; exit code 1 if
there is a problem, 0 with warnings alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource
from rich.console import Console

from services.cli.examples import with_examples
from services.cli.failures import EXIT_FAILED, Misconfigured
from services.cli.running import run_async
from services.cli.targets import BUFFER, ENGINE, SCHEDULER, security_options, target_option
from services.doctor.checkup import SETTINGS, Question, checkup
from services.doctor.finding import Verdict
from services.doctor.targets import Place
from services.views.checkup import checkup_table

_SERVICES: Final = ("buffer", "engine", "scheduler")


@click.command(
    help=with_examples(
        "Look at what keeps services from working: versions, a package in the way, ports, proxies, clocks, engines, "
        "certificates, disks, limits. Each problem comes with what to do. Run it where a service runs, or where one "
        "cannot reach it. Exit code 1 if there is a problem.",
        "turnout doctor                                     this machine, before anything runs",
        "turnout doctor --scheduler trainer:50053           from a node: can it be reached?",
        "turnout doctor --target rollout-3:50052 --json",
        "turnout doctor --data-dir /var/lib/turnout/buffer  is this disk good enough?",
        "turnout doctor --config buffer=/etc/turnout/buffer.yaml",
    )
)
@target_option("buffer", BUFFER)
@target_option("engine", ENGINE)
@target_option("scheduler", SCHEDULER)
@click.option("--target", "more", metavar="TARGET", multiple=True, help="Any other service of ours, such as an agent.")
@click.option(
    "--data-dir",
    "data_dirs",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Look at the disk of this data directory, beside those that settings name.",
)
@click.option("--config", "configs", metavar="SERVICE=FILE", multiple=True, help="YAML file of a service's settings.")
@security_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(
    context: click.Context,
    buffer: str,
    engine: str,
    scheduler: str,
    more: tuple[str, ...],
    data_dirs: tuple[Path, ...],
    configs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check, and print what was found."""
    places = [
        Place(service, target, context.get_parameter_source(service) is not ParameterSource.DEFAULT)
        for service, target in zip(_SERVICES, (buffer, engine, scheduler), strict=True)
    ]
    places += [Place("", target, expected=True) for target in more]
    findings = run_async(checkup(Question(tuple(places), data_dirs, _configs(configs))))
    problems = any(finding.verdict is Verdict.PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "findings": [finding.to_dict() for finding in findings]}))
    else:
        Console(highlight=False).print(checkup_table(findings))
    context.exit(EXIT_FAILED if problems else 0)


def _configs(given: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for text in given:
        service, _, path = text.partition("=")
        if service not in SETTINGS or not path:
            raise Misconfigured(f"--config {text}: write SERVICE=FILE, with one of {', '.join(SETTINGS)}")
        found[service] = Path(path)
    return found
