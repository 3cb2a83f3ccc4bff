"""`turnout bench vllm`."""

from __future__ import annotations

import importlib.util

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.running import run_async


@click.command(
    help=with_examples(
        "Measure sleep, wake, pause, resume, cache resets and generation of a real vLLM on this machine's CPU, through "
        "the backend and through the controller, each beside the same engine called directly. Needs vLLM in the "
        "environment, such as that of 'make .venv-vllm/.ready'.",
        "turnout bench vllm --json",
        "turnout bench vllm --rounds 20",
    )
)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=10, show_default=True, help="Measurements of each kind."
)
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def vllm(rounds: int, as_json: bool) -> None:
    """Run the bench."""
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException("vllm is not installed here; 'make .venv-vllm/.ready' makes an environment with it")
    from services.bench.vllm import measure

    async def run() -> None:
        async for result in measure(rounds):
            show(result, as_json=as_json)

    run_async(run())
