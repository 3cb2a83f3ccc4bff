"""What commands that read a run's events share.

Invariants: events come in order, each once; where the oldest were trimmed, reading begins with the first one kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import click

from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.views.run_events import EventsError, read_events
from turnout.client import AsyncSchedulerClient, ClientOptions, OutOfRange, RetryPolicy, Timeouts, TurnoutError
from turnout.scheduler.v1 import events_pb2, scheduler_pb2


def first_call() -> ClientOptions:
    """Options of a client whose first question tells whether the scheduler is there; a person waits for it."""
    return ClientOptions(timeouts=Timeouts(call=5.0, attempt=5.0), retry=RetryPolicy(max_attempts=1))


async def only_run(client: AsyncSchedulerClient, option: str) -> str:
    """The run, if there is only one, or only one that is open. Raises CommandFailed, which names `option`."""
    runs = (await client.calls.ListRuns(scheduler_pb2.ListRunsRequest())).runs
    if not runs:
        raise CommandFailed("there are no runs")
    open_runs = [run for run in runs if run.open] or list(runs)
    if len(open_runs) > 1:
        raise CommandFailed(f"there are several runs: choose one with {option}", [run.run_id for run in open_runs])
    return open_runs[0].run_id


async def kept_events(client: AsyncSchedulerClient, run_id: str) -> AsyncIterator[events_pb2.RunEvent]:
    """Yield every event of the run that is kept, up to the present."""
    first = 1
    while True:
        request = scheduler_pb2.WatchRunRequest(run_id=run_id, from_sequence=first, no_follow=True)
        try:
            async with aclosing(client.watch_run(request)) as events:
                async for event in events:
                    first = event.sequence + 1
                    yield event
            return
        except OutOfRange as error:
            # Older events were trimmed; the service says where to begin.
            kept = int(error.metadata.get("first", "0"))
            if kept <= first:
                raise
            first = kept


def read_run(run_id: str | None, events: Path | None, scheduler: str) -> tuple[str, list[events_pb2.RunEvent]]:
    """Name and events of a run: from a file of `turnout events`, else from the scheduler; without a name of the only
    one. Raises click.UsageError for the file, CommandFailed for the rest, also if there are none."""
    try:
        if events is not None:
            name, found = run_id or events.stem, list(read_events(events))
        else:
            name, found = run_async(_read(run_id, scheduler))
    except EventsError as error:
        raise click.UsageError(f"--events {error}") from error
    except TurnoutError as error:
        raise CommandFailed(f"the scheduler at {scheduler}: {error}") from error
    if not found:
        raise CommandFailed(f"there is no event of {name}")
    return name, found


async def _read(run_id: str | None, scheduler: str) -> tuple[str, list[events_pb2.RunEvent]]:
    async with AsyncSchedulerClient(scheduler, first_call()) as client:
        name = run_id or await only_run(client, "its name")
        return name, [event async for event in kept_events(client, name)]
