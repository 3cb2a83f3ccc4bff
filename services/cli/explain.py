"""`turnout explain`: why the GPUs of a run moved, or stayed.

Invariant: stdout carries the explanation, or with --json one decision a line and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.targets import SCHEDULER, security_options, target_option
from services.cli.watching import read_run
from services.views.explanation import as_rows, explain
from services.views.report.account import account_of


@click.command(
    "explain",
    help=with_examples(
        "Say why the GPUs of a run were lent, taken back, or left where they were: one sentence a decision, what the "
        "step waited against what was predicted, and what each lend brought. With a step, also every number used.",
        "turnout explain my-run",
        "turnout explain my-run 41             one step, with all the numbers",
        "turnout explain my-run --json | jq .reason",
    ),
)
@click.argument("run_id", metavar="[RUN]", required=False)
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read the events from this file, which 'turnout events' wrote, instead of from the scheduler.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a decision.")
@target_option("scheduler", SCHEDULER)
@security_options
def explain_command(run_id: str | None, step: int | None, events: Path | None, as_json: bool, scheduler: str) -> None:
    """Print the explanation."""
    name, found = read_run(run_id, events, scheduler)
    account = account_of(found)
    if step is not None and all(one.number != step for one in account.steps):
        kept = f"there are {account.steps[0].number} to {account.steps[-1].number}" if account.steps else "none began"
        raise CommandFailed(f"nothing is kept of step {step} of {name}: {kept}")
    lines = (json.dumps(row) for row in as_rows(account, step)) if as_json else explain(account, step)
    for line in lines:
        click.echo(line)
