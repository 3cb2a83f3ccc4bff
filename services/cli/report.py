"""`turnout report`: one run, as a page or a picture that can be handed on.

Invariants: everything shown comes from the run's events, read from the scheduler or from a file of `turnout events`; an
existing file is replaced only once the new one is whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.targets import SCHEDULER, security_options, target_option
from services.cli.watching import read_run
from turnout.scheduler.v1 import events_pb2

_KINDS = (".html", ".png")


@click.command(
    help=with_examples(
        "Report on one run: the timeline of every replica, the depth against the threshold, every decision with its "
        "reasons and numbers, waits, lends and what they brought. An HTML file opens offline; a PNG is one picture.",
        "turnout report my-run -o report.html",
        "turnout report -o report.png          the only run there is",
        "turnout report --events run.jsonl -o report.html",
    )
)
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="turnout-report.html",
    show_default=True,
    help="File to write; its ending, .html or .png, says what.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read the events from this file, which 'turnout events' wrote, instead of from the scheduler.",
)
@target_option("scheduler", SCHEDULER)
@security_options
def report(run_id: str | None, output: Path, events: Path | None, scheduler: str) -> None:
    """Write the report."""
    check_output(output)
    name, found = read_run(run_id, events, scheduler)
    write_report(found, name, output)
    click.echo(f"report: {output}")


def check_output(output: Path) -> None:
    """Refuse a file that no report can be written to. Raises click.UsageError."""
    if output.suffix not in _KINDS:
        raise click.UsageError(f"{output}: the ending has to be one of {', '.join(_KINDS)}")


def write_report(events: list[events_pb2.RunEvent], name: str, output: Path) -> None:
    """Write the report of a run's events to `output`. Raises CommandFailed."""
    # matplotlib takes a second to import, which only a report is worth.
    from services.views.report import account_of, draw, render

    account = account_of(events)
    partial = output.with_name(f".{output.name}.part")
    try:
        if output.suffix == ".png":
            draw(account, name, partial)
        else:
            partial.write_text(render(account, name), encoding="utf-8")
        os.replace(partial, output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CommandFailed(f"{output}: cannot be written: {error.strerror or error}") from error
