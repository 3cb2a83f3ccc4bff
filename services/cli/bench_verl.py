"""`turnout bench verl`."""

from __future__ import annotations

import importlib.util

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.running import run_async


@click.command(
    help=with_examples(
        "Measure the depth query and the wake-up of the verl adapter beside verl's own replay buffer, over one real "
        "TransferQueue. Needs verl in the environment, such as that of 'make .venv-verl/.dev'.",
        "turnout bench verl --json",
        "turnout bench verl --groups 4000",
    )
)
@click.option("--groups", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Finished groups.")
@click.option("--sessions", type=click.IntRange(1, 64), default=8, show_default=True, help="Outputs per group.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=20, show_default=True, help="Measurements of each.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def verl(groups: int, sessions: int, rounds: int, as_json: bool) -> None:
    """Run the bench."""
    if importlib.util.find_spec("verl") is None:
        raise click.ClickException("verl is not installed here; 'make .venv-verl/.dev' makes an environment with it")
    from services.bench.verl import measure

    async def run() -> None:
        async for result in measure(groups, sessions, rounds):
            show(result, as_json=as_json)

    run_async(run())
