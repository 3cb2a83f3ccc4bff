"""`turnout events`: a run's events as JSON lines, to keep or to pipe.

Invariant: stdout carries one JSON object a line and nothing else; what was written before a failure stays valid.
"""

from __future__ import annotations

from contextlib import aclosing

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.cli.targets import SCHEDULER, security_options, target_option
from services.cli.watching import first_call, kept_events, only_run
from services.views.run_events import line_of
from turnout.client import AsyncSchedulerClient, TurnoutError
from turnout.scheduler.v1 import events_pb2, scheduler_pb2


@click.command(
    help=with_examples(
        "Print the events of a run, one JSON object a line: everything that policies, reports and simulations know.",
        "turnout events my-run > my-run.jsonl          to report on later",
        "turnout events my-run --follow | jq .decision_made.reason",
    )
)
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--follow", is_flag=True, help="Go on with what happens from now on, until Ctrl-C.")
@target_option("scheduler", SCHEDULER)
@security_options
def events(run_id: str | None, follow: bool, scheduler: str) -> None:
    """Print the events."""
    try:
        run_async(_print(run_id, follow, scheduler))
    except TurnoutError as error:
        raise CommandFailed(f"the scheduler at {scheduler}: {error}") from error
    except KeyboardInterrupt:
        # The only way out of following; not a failure.
        return


async def _print(run_id: str | None, follow: bool, scheduler: str) -> None:
    last = 0
    async with AsyncSchedulerClient(scheduler, first_call()) as client:
        name = run_id or await only_run(client, "its name")
        async for event in kept_events(client, name):
            last = event.sequence
            _echo(event)
    if follow:
        request = scheduler_pb2.WatchRunRequest(run_id=name, from_sequence=last + 1)
        async with (
            AsyncSchedulerClient(scheduler) as client,
            aclosing(client.watch_run(request)) as more,
        ):
            async for event in more:
                _echo(event)


def _echo(event: events_pb2.RunEvent) -> None:
    click.echo(line_of(event))
