"""`turnout bench buffer`."""

from __future__ import annotations

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.running import run_async


@click.command(
    help=with_examples(
        "Measure the replay buffer: calls, wake-ups, results and payloads, each beside a bare gRPC server that moves "
        "the same bytes, then memory, recovery and the event loop at 100 000 groups of 8. Takes some minutes.",
        "turnout bench buffer --json",
        "turnout bench buffer --only wake_1 --only depth_query",
    )
)
@click.option("--only", multiple=True, metavar="NAME", help="A figure to measure; repeat it for more. Default: all.")
@click.option("--quick", is_flag=True, help="Show that everything runs, in seconds; the values mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def buffer(only: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Run the bench."""
    from services.bench.buffer import FIGURES, measure

    unknown = [name for name in only if name not in FIGURES]
    if unknown:
        raise click.BadParameter(f"no figure {unknown[0]!r}; there are: {', '.join(FIGURES)}", param_hint="--only")

    async def run() -> None:
        async for result in measure(only, quick=quick):
            show(result, as_json=as_json)

    run_async(run())
