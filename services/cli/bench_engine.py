"""`turnout bench engine`."""

from __future__ import annotations

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.running import run_async


@click.command(
    help=with_examples(
        "Measure the engine controller over the reference engine: what it adds to single calls, to the tokens of 8 "
        "requests and to a reclaim, each beside the same call on the node agent itself; how soon it knows that an idle "
        "engine or agent died; and fan-outs over 64 replicas beside one. Takes about a minute.",
        "turnout bench engine --json",
        "turnout bench engine --only reclaim",
    )
)
@click.option("--only", multiple=True, metavar="NAME", help="A figure to measure; repeat it for more. Default: all.")
@click.option("--quick", is_flag=True, help="Show that everything runs, in seconds; the values mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def engine(only: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Run the bench."""
    from services.bench.engine import FIGURES, measure

    unknown = [name for name in only if name not in FIGURES]
    if unknown:
        raise click.BadParameter(f"no figure {unknown[0]!r}; there are: {', '.join(FIGURES)}", param_hint="--only")

    async def run() -> None:
        async for result in measure(only, quick=quick):
            show(result, as_json=as_json)

    run_async(run())
