"""`turnout bench`: measure the services on this machine.

Invariants: one line per result on stdout; with --json each is a JSON object `{"name", "unit", "value", "baseline",
"ratio"}`.
"""

from __future__ import annotations

import click

from services.bench.result import Result
from services.cli.examples import with_examples
from services.cli.lazy import Entry, LazyGroup
from services.cli.running import run_async

_BENCHES = {
    "idle": Entry("services.cli.bench:idle", "Processor time while 100 calls are parked."),
    "buffer": Entry("services.cli.bench_buffer:buffer", "The replay buffer beside a bare server."),
}


@click.group(
    "bench",
    cls=LazyGroup,
    entries=_BENCHES,
    invoke_without_command=True,
    help=with_examples(
        "Measure the services on this machine, each value beside that of the bare tools underneath. Without a name all "
        "benches run.",
        "turnout bench",
        "turnout bench idle --seconds 60 --json",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
@click.pass_context
def bench(context: click.Context, as_json: bool) -> None:
    """Run all benches unless one is named."""
    from services.cli.bench_buffer import buffer

    context.obj = as_json
    if context.invoked_subcommand is None:
        context.invoke(idle, as_json=as_json)
        context.invoke(buffer, as_json=as_json)


@click.command(
    help=with_examples(
        "Measure the share of one core that the three services use together while many calls are parked: waits of "
        "trainers, waits of workers, watches of replicas, each on a connection of its own.",
        "turnout bench idle",
        "turnout bench idle --seconds 60 --waiters 1000 --json",
    )
)
@click.option("--seconds", type=click.FloatRange(1, 3600), default=20, show_default=True, help="How long to measure.")
@click.option("--waiters", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Parked calls.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
@click.pass_context
def idle(context: click.Context, seconds: float = 20, waiters: int = 100, as_json: bool = False) -> None:
    """Run the bench."""
    from services.bench.idle import idle_share

    result = run_async(idle_share(seconds, waiters))
    show(result, as_json=as_json or bool(context.obj))


def show(result: Result, *, as_json: bool) -> None:
    """Print a result as soon as it is there."""
    if as_json:
        click.echo(result.to_line())
    else:
        click.echo(f"{result.name}: {result.value:.2f} {result.unit} (bare: {result.baseline:.2f})")
