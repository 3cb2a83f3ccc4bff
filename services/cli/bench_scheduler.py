"""`turnout bench scheduler`."""

from __future__ import annotations

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.running import run_async


@click.command(
    help=with_examples(
        "Measure the switch scheduler: decisions of jit with 1024 requests in flight beside verl's, what following "
        "them costs, and calls that do not wait beside a bare server that answers with the same bytes.",
        "turnout bench scheduler --json",
        "turnout bench scheduler --only decision_step_end_1024",
    )
)
@click.option("--only", multiple=True, metavar="NAME", help="A figure to measure; repeat it for more. Default: all.")
@click.option("--quick", is_flag=True, help="Show that everything runs, in seconds; the values mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def scheduler(only: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Run the bench."""
    from services.bench.scheduler import FIGURES, measure

    unknown = [name for name in only if name not in FIGURES]
    if unknown:
        raise click.BadParameter(f"no figure {unknown[0]!r}; there are: {', '.join(FIGURES)}", param_hint="--only")

    async def run() -> None:
        async for result in measure(only, quick=quick):
            show(result, as_json=as_json)

    run_async(run())
