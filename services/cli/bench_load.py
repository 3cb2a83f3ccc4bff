"""`turnout bench load`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from services.cli.bench import show
from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.processes.child import ChildFailed
from turnout.client import TurnoutError


@click.command(
    help=with_examples(
        "Run the whole deployment under a steady load, with a journal on disk, TLS and tokens: workers that claim, "
        "renew and finish, a trainer for each run that steps, samples and commits, and somebody who asks for the "
        "depth. Reports errors, lost groups, the time of depth queries beside that of a bare server, and the slope of "
        "each service's memory. What is measured begins once the buffer is full. See docs/load.md.",
        "turnout bench load                     ten minutes, 64 workers, 4 runs, 10 000 groups",
        "turnout bench load --seconds 120 --rate 32 --json",
        "turnout bench load --seconds 20 --groups 400 --workers 8 --open",
    )
)
@click.option(
    "--seconds", type=click.FloatRange(5, 86_400), default=600, show_default=True, help="How long to measure."
)
@click.option("--runs", type=click.IntRange(1, 64), default=4, show_default=True, help="Runs, of one trainer each.")
@click.option("--workers", type=click.IntRange(1, 4096), default=64, show_default=True, help="Workers, over all runs.")
@click.option(
    "--groups", type=click.IntRange(10, 1_000_000), default=10_000, show_default=True, help="Resident, over all runs."
)
@click.option("--group-size", type=click.IntRange(2, 64), default=8, show_default=True, help="Trajectories of a group.")
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 1000),
    default=16,
    show_default=True,
    help="Groups per second that all trainers consume together, and workers produce.",
)
@click.option(
    "--payload-bytes",
    type=click.IntRange(1, 256 << 10),
    default=4096,
    show_default=True,
    help="Payload of a trajectory.",
)
@click.option(
    "--queries", type=click.FloatRange(1, 1000), default=20, show_default=True, help="Depth queries per second."
)
@click.option("--open", "in_the_open", is_flag=True, help="Without TLS and tokens.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="Directory on the disk that holds the journals meanwhile. Default: a temporary one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON objects, one per line.")
def load(
    seconds: float,
    runs: int,
    workers: int,
    groups: int,
    group_size: int,
    rate: float,
    payload_bytes: int,
    queries: float,
    in_the_open: bool,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Run the bench."""
    from services.bench.load import measure
    from services.bench.load_deployment import NoCertificate
    from services.bench.load_plan import STEP_S, Plan

    if workers % runs or groups % runs:
        raise click.UsageError("--workers and --groups have to be multiples of --runs")
    plan = Plan(seconds, runs, workers, groups, group_size, rate, payload_bytes, queries)
    if plan.least_resident <= 0:
        raise click.UsageError(
            f"at this --rate the trainers take {plan.batch * plan.runs} groups every {STEP_S:g} s: --groups has to be "
            "more than twice as many"
        )
    with tempfile.TemporaryDirectory(prefix="turnout-load-", dir=directory) as place:
        try:
            results = run_async(
                measure(plan, Path(place), secure=not in_the_open, say=lambda line: click.echo(line, err=True))
            )
        except ChildFailed as failed:
            raise CommandFailed(str(failed), failed.last_lines) from failed
        except (NoCertificate, TurnoutError) as error:
            raise CommandFailed(str(error)) from error
        except TimeoutError as error:
            raise CommandFailed("it did not come to an end in time: offer less, or look at what else runs") from error
    for result in results:
        show(result, as_json=as_json)
