"""`turnout simulate`: what lending would gain, with which policy, before anyone moves a GPU.

Invariants: stdout carries the table, or with --json one JSON object a line and nothing else; progress goes to stderr,
and only to a terminal; runs of different policies with one seed are paired.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.progress import progress_bar
from services.cli.simulate_fit import fitted, fitted_to_run
from services.scheduler.policies import UnknownPolicyError, create
from services.simulator import Result, Workload, WorkloadError, load, names, simulate
from services.simulator.oracle import oracle
from services.views.run_events import EventsError, read_events
from services.views.simulation import band, savings, simulation_picture, simulation_table
from turnout.scheduler.v1 import events_pb2

ORACLE: Final = "oracle"
_ALL: Final = "all"
_DEFAULT: Final = "calibrated"


@click.command(
    help=with_examples(
        "Simulate training runs with the real switch policies. A workload is a name, a YAML file, or 'all'; without "
        "one, the published setting is simulated. The table compares every policy with not switching.",
        "turnout simulate",
        "turnout simulate --workload all --policy verl,jit --seeds 5",
        "turnout simulate --workload mine.yaml --policy jit --oracle --picture gain.png",
        "turnout simulate --workload mine.yaml --from-verl-metrics run.jsonl",
        "turnout simulate --from-run my-run.jsonl --policy verl,jit",
        "turnout simulate --workload all --json > results.jsonl",
    )
)
@click.option("--workload", default=_DEFAULT, show_default=True, metavar="NAME|FILE|all", help="What to simulate.")
@click.option("--policy", default="off,verl,jit", show_default=True, metavar="NAME[,NAME]", help="Policies to compare.")
@click.option("--seed", type=click.IntRange(0, 65_535), default=0, show_default=True, help="First seed.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many seeds.")
@click.option(
    "--steps",
    type=click.IntRange(2, 100_000),
    help="Steps of every run, instead of the workload's own; fewer if its prompts end.",
)
@click.option(
    "--from-verl-metrics",
    "verl_metrics",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fit the workload to what a verl run logged (its file logger's JSONL, or a CSV export); --workload names the "
    "run's topology and batch. An error band comes with it.",
)
@click.option(
    "--from-run",
    "run_events",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fit the workload to the events of a run of Turnout's own, a file that 'turnout events' wrote.",
)
@click.option("--oracle", "with_oracle", is_flag=True, help="Also search for the best schedule with full knowledge.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, nothing else.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the gains as a PNG file.")
@click.option("--list", "show_names", is_flag=True, help="List the built-in workloads and stop.")
def simulate_command(
    workload: str,
    policy: str,
    seed: int,
    seeds: int,
    steps: int | None,
    verl_metrics: Path | None,
    run_events: Path | None,
    with_oracle: bool,
    as_json: bool,
    picture: Path | None,
    show_names: bool,
) -> None:
    """Fit, simulate, print, draw."""
    if show_names:
        for name in names():
            click.echo(f"{name:22} {load(name).description}")
        return
    if verl_metrics is not None and run_events is not None:
        raise click.UsageError("only one of --from-verl-metrics and --from-run")
    loaded = _load(workload)
    if verl_metrics is not None:
        loaded = fitted(verl_metrics, loaded, quiet=as_json)
    if run_events is not None:
        loaded = [fitted_to_run(_events(run_events), run_events.name, loaded, quiet=as_json)]
    workloads = [_shortened(each, steps) for each in loaded]
    policies = _policies(policy, workloads[0])
    if with_oracle:
        policies.append(ORACLE)
    asked = tuple(policies)
    if not as_json and "off" not in policies:
        policies.insert(0, "off")
    results: list[Result] = []
    total = sum(each.steps for each in workloads) * len(policies) * seeds
    with progress_bar("simulating", total) as advance:
        for each in workloads:
            for number in range(seed, seed + seeds):
                for name in policies:
                    result = _run(each, name, number, advance)
                    results.append(result)
                    if as_json:
                        click.echo(json.dumps(result.as_row()))
    if not as_json:
        Console().print(simulation_table(results))
        if verl_metrics is not None:
            Console().print(band(savings(results, asked)))
    if picture is not None:
        try:
            simulation_picture(savings(results, asked), picture)
        except OSError as error:
            raise CommandFailed(f"the picture cannot be written: {error}") from error
        if not as_json:
            click.echo(f"Picture: {picture}")


def _events(path: Path) -> list[events_pb2.RunEvent]:
    try:
        return list(read_events(path))
    except EventsError as error:
        raise click.UsageError(f"--from-run {error}") from error


def _load(workload: str) -> list[Workload]:
    try:
        return [load(name) for name in (names() if workload == _ALL else (workload,))]
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error


def _shortened(workload: Workload, steps: int | None) -> Workload:
    if steps is None:
        return workload
    batch = workload.batch
    # A job whose prompts are counted has no further steps.
    most = steps if batch.supply is None else min(steps, batch.supply // batch.groups)
    return workload.model_copy(update={"steps": most})


def _policies(text: str, workload: Workload) -> list[str]:
    asked = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in asked:
        try:
            create(name, workload.policy_config())
        except UnknownPolicyError as error:
            raise click.UsageError(f"--policy: {error}") from error
    if not asked:
        raise click.UsageError("--policy names no policy")
    return asked


def _run(workload: Workload, name: str, seed: int, advance: Callable[[int], None]) -> Result:
    done = 0

    def progress(step: int) -> None:
        nonlocal done
        advance(step - done)
        done = step

    if name == ORACLE:
        return oracle(workload, seed, progress=progress)
    return simulate(workload, name, seed, progress=progress)
