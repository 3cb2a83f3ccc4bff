"""`turnout top`: watch one run live, from its event stream.

Invariants: everything shown comes from WatchRun; the stream goes on after a restart of the scheduler; the terminal is
left as it was found.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

import click
from rich.console import Console
from rich.live import Live

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.cli.targets import SCHEDULER, security_options, target_option
from services.cli.watching import first_call, kept_events, only_run
from services.views.run_state import RunState
from services.views.top import frame
from turnout.client import AsyncSchedulerClient, TurnoutError
from turnout.scheduler.v1 import scheduler_pb2

_REFRESH_S: Final = 0.25
"""Fast enough to look live, slow enough to cost nothing."""


@click.command(
    help=with_examples(
        "Watch one run live: who has the GPUs, how many groups are ready against the threshold, what each replica "
        "does, and what was decided and why. Ctrl-C ends it.",
        "turnout top",
        "turnout top --run my-run --scheduler 10.0.0.5:50053",
        "turnout top --once          one frame, for scripts",
    )
)
@click.option("--run", "run_id", metavar="RUN", help="Run to watch; not needed if there is only one.")
@target_option("scheduler", SCHEDULER)
@security_options
@click.option("--once", is_flag=True, help="Print one frame of what is known now, and end.")
def top(run_id: str | None, scheduler: str, once: bool) -> None:
    """Show the run."""
    try:
        run_async(_top(run_id, scheduler, once))
    except TurnoutError as error:
        raise CommandFailed(f"the scheduler at {scheduler}: {error}") from error
    except KeyboardInterrupt:
        # The only way out of a live view; not a failure.
        return


async def _top(run_id: str | None, scheduler: str, once: bool) -> None:
    async with AsyncSchedulerClient(scheduler, first_call()) as client:
        run_id = run_id or await only_run(client, "--run")
        state = RunState()
        async for event in kept_events(client, run_id):
            state.fold(event)
        console = Console(highlight=False)
        if once:
            console.print(frame(run_id, state))
            return
    async with AsyncSchedulerClient(scheduler) as client:
        await _live(client, run_id, state, console)


async def _live(client: AsyncSchedulerClient, run_id: str, state: RunState, console: Console) -> None:
    async def follow() -> None:
        request = scheduler_pb2.WatchRunRequest(run_id=run_id, from_sequence=state.sequence + 1)
        async with aclosing(client.watch_run(request)) as events:
            async for event in events:
                state.fold(event)

    following = asyncio.create_task(follow())
    try:
        with Live(frame(run_id, state), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while not following.done():
                await asyncio.wait({following}, timeout=_REFRESH_S)
                live.update(frame(run_id, state), refresh=True)
        following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
