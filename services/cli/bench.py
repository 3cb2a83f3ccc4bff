"""`turnout bench`: measure the services on this machine.

Invariants: one line per result on stdout; with --json each is a JSON object `{"name", "unit", "value", "baseline",
"ratio"}`, with `"limit"` and `"met"` where something is to be reached, or `{"name", "skipped"}` for what cannot be
measured here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click

from services.bench.result import Result, Skipped
from services.cli.examples import with_examples
from services.cli.lazy import Entry, LazyGroup
from services.cli.running import run_async

_BENCHES: Final = {
    "idle": Entry("services.cli.bench:idle", "Processor time while 100 calls are parked."),
    "journal": Entry("services.cli.bench:journal", "Records stored per second, and how long one takes."),
    "buffer": Entry("services.cli.bench_buffer:buffer", "The replay buffer beside a bare server."),
    "engine": Entry("services.cli.bench_engine:engine", "The engine controller beside the engines alone."),
    "scheduler": Entry("services.cli.bench_scheduler:scheduler", "The switch scheduler beside a bare server."),
    "load": Entry("services.cli.bench_load:load", "The whole deployment under a steady load, for ten minutes."),
    "verl": Entry("services.cli.bench_verl:verl", "verl's own replay buffer beside the adapter's; needs verl."),
    "vllm": Entry("services.cli.bench_vllm:vllm", "A real vLLM behind us beside vLLM alone; needs vLLM."),
}

_as_json: Final[Callable[[Any], Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line."
)


@click.group(
    "bench",
    cls=LazyGroup,
    entries=_BENCHES,
    invoke_without_command=True,
    help=with_examples(
        "Measure the services on this machine, each value beside that of the bare tools underneath. Without a name all "
        "benches run.",
        "turnout bench",
        "turnout bench --json",
        "turnout bench idle --seconds 60",
    ),
)
@_as_json
@click.pass_context
def bench(context: click.Context, as_json: bool) -> None:
    """Run all benches unless one is named."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(
                f"say it behind the name: turnout bench {context.invoked_subcommand} --json", context
            )
        return
    from services.cli.bench_buffer import buffer
    from services.cli.bench_engine import engine
    from services.cli.bench_scheduler import scheduler

    for command in (idle, journal, buffer, engine, scheduler):
        context.invoke(command, as_json=as_json)


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
@_as_json
def idle(seconds: float, waiters: int, as_json: bool) -> None:
    """Run the bench."""
    from services.bench.idle import idle_share

    _print([run_async(idle_share(seconds, waiters))], as_json)


@click.command(
    help=with_examples(
        "Measure how many records the journal of the services stores per second and how long one takes, with one "
        "caller and with 64, beside a bare file and bare SQLite.",
        "turnout bench journal",
        "turnout bench journal --directory /data --json     on the disk that will hold it",
    )
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="Directory on the disk to measure. Default: a temporary one.",
)
@click.option("--seconds", type=click.FloatRange(0.01, 60), default=0.2, show_default=True, help="Length of a slot.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Slots of each kind.")
@_as_json
def journal(directory: Path | None, seconds: float, rounds: int, as_json: bool) -> None:
    """Run the bench."""
    from services.bench.journal import measure

    with tempfile.TemporaryDirectory(dir=directory) as place:
        _print(run_async(measure(Path(place), seconds, rounds)), as_json)


def _print(results: Iterable[Result], as_json: bool) -> None:
    for result in results:
        show(result, as_json=as_json)


def show(result: Result | Skipped, *, as_json: bool) -> None:
    """Print a result as soon as it is there."""
    if as_json:
        click.echo(result.to_line())
    elif isinstance(result, Skipped):
        click.echo(f"{result.name}: skipped, {result.reason}")
    else:
        click.echo(result.to_text())
