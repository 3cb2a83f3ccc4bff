"""What commands that read a run's events share.

Invariants: events come in order, each once; where the oldest were trimmed, reading begins with the first one kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

from services.cli.failures import CommandFailed
from turnout.client import AsyncSchedulerClient, ClientOptions, OutOfRange, RetryPolicy, Timeouts
from turnout.scheduler.v1 import events_pb2, scheduler_pb2

FIRST_CALL: Final = ClientOptions(timeouts=Timeouts(call=5.0, attempt=5.0), retry=RetryPolicy(max_attempts=1))
"""The first question tells whether the scheduler is there; a person waits for it."""


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
