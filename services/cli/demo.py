"""`turnout demo`: the same training job without and with switching.

Invariants: stdout carries the table and the path of the picture, or with --json one JSON object and nothing else;
progress goes to stderr; whatever ends the command, its processes and temporary files are gone when it returns. Exit
code 1 if a process failed, or if a group was lost, repeated or not the same in both jobs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import click
from rich.console import Console

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed, Misconfigured
from services.cli.report import check_output, write_report
from services.cli.running import run_async
from services.cli.targets import forget_security
from services.demo.comparison import Comparison, compare
from services.demo.events import Event
from services.demo.job import SMALLEST_TIME_SCALE, Job
from services.demo.lines import demo_table, summary
from services.demo.prompts import PromptsError, load_prompts, sample_file
from services.demo.run import recorder_of, run_job
from services.processes.child import ChildFailed
from services.scheduler.policies import names
from services.scheduler.policies.shadow import PREFIX
from services.views.demo_progress import DemoProgress, demo_progress
from services.views.table import duration
from services.views.timeline import timeline
from turnout.scheduler.v1 import events_pb2

_DEFAULT: Final = Job()
PICTURE: Final = "turnout-demo.png"


@click.command(
    help=with_examples(
        "Run one training job twice, without and with switching: real processes for the three services, the node "
        "agents with 2 standalone and 4 hybrid replicas, the rollout workers and the trainer. The engines are small "
        "CPU ones that decode at the speed of a published run; all durations are scaled down together.",
        "turnout demo",
        "turnout demo --prompts mine.jsonl --events demo-events.jsonl",
        "turnout demo --seeds 5 --json > figures.json",
        "turnout demo --steps 10 --time-scale 0.1     longer, and closer to real time",
    )
)
@click.option("--seed", type=click.IntRange(0, 65_535), default=0, show_default=True, help="First seed.")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many seeds, one after another."
)
@click.option("--policy", default=_DEFAULT.policy, show_default=True, help="Policy of the job with switching.")
@click.option(
    "--steps", type=click.IntRange(1, 10_000), default=_DEFAULT.steps, show_default=True, help="Training steps."
)
@click.option(
    "--mini-batch-size",
    type=click.IntRange(1, 1024),
    default=_DEFAULT.mini_batch_size,
    show_default=True,
    help=f"Groups per mini-batch; a step has {_DEFAULT.mini_batches} mini-batches.",
)
@click.option(
    "--group-size",
    type=click.IntRange(1, 64),
    default=_DEFAULT.group_size,
    show_default=True,
    help="Trajectories per group.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(SMALLEST_TIME_SCALE, 1.0),
    default=_DEFAULT.time_scale,
    show_default=True,
    help="Wall seconds per second of the job. Smaller is faster, until this machine cannot keep up.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help='Prompts, one JSON object per line: {"id": "a", "prompt": "..."}. Default: the sample that ships.',
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every group, replica and step event to this file, one JSON object per line.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=PICTURE,
    show_default=True,
    help="Where to write the timeline of the first seed (PNG).",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report of the first seed's job with switching to this file (.html or .png); see 'turnout report'.",
)
@click.option("--no-picture", is_flag=True, help="Write no picture.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def demo(
    seed: int,
    seeds: int,
    policy: str,
    steps: int,
    mini_batch_size: int,
    group_size: int,
    time_scale: float,
    prompts: Path | None,
    events: Path | None,
    picture: Path,
    no_picture: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run the demo."""
    forget_security()
    _check_policy(policy)
    if report is not None:
        check_output(report)
    prompts_path = (prompts or sample_file()).absolute()
    try:
        load_prompts(prompts_path)
    except PromptsError as error:
        raise Misconfigured(str(error)) from error
    if not no_picture and not os.access(picture.absolute().parent, os.W_OK):
        raise Misconfigured(f"{picture}: cannot be written: no such directory, or not a writable one")
    job = Job(policy=policy, steps=steps, mini_batch_size=mini_batch_size, group_size=group_size, time_scale=time_scale)
    jobs = [replace(job, seed=seed + number) for number in range(seeds)]
    comparisons = []
    with (
        _event_file(events) as event_file,
        demo_progress(Console(stderr=True, highlight=False), seeds=seeds, steps=steps) as progress,
    ):
        for one in jobs:
            off, on, run_events = run_async(_run_pair(one, prompts_path, progress, event_file))
            if one is jobs[0] and report is not None:
                write_report(run_events, replace(one, switching=True).run_id, report)
            comparisons.append(compare(one.seed, off, on))
            if one is jobs[0] and not no_picture:
                _draw(picture, job, comparisons[0], off, on)
    if as_json:
        click.echo(json.dumps({"seeds": [comparison.to_dict() for comparison in comparisons]}))
    else:
        console = Console(highlight=False)
        for comparison in comparisons:
            console.print(demo_table(comparison, job))
        console.print(summary(comparisons), markup=False)
    if not no_picture:
        click.echo(f"timeline: {picture}", err=as_json)
    if report is not None:
        click.echo(f"report: {report}", err=as_json)
    if events is not None:
        click.echo(f"events: {events}", err=as_json)
    faults = [fault for comparison in comparisons for fault in comparison.faults]
    if faults:
        raise CommandFailed("the two jobs did not deliver the same", faults)


async def _run_pair(
    job: Job, prompts: Path, progress: DemoProgress, event_file: TextIO | None
) -> tuple[list[Event], list[Event], list[events_pb2.RunEvent]]:
    """Run a seed's job without and with switching; return the events of both, and the latter's own run events."""
    pair = []
    for switching in (False, True):
        one = replace(job, switching=switching)
        progress.begin(one.seed, one.mode)
        recorder = recorder_of(one, progress.take)
        try:
            await run_job(one, prompts, recorder)
        except ChildFailed as failed:
            where = f"while seed {one.seed} ran with switching {one.mode}"
            raise CommandFailed(f"{failed} {where}", failed.last_lines) from failed
        finally:
            if event_file is not None:
                event_file.writelines(event.to_line(one.seed, one.mode) + "\n" for event in recorder.events)
                event_file.flush()
        progress.end()
        pair.append(recorder.events)
    return pair[0], pair[1], recorder.run_events


@contextmanager
def _event_file(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise Misconfigured(f"{path}: cannot be written: {error.strerror or error}") from error
    with file:
        yield file


def _check_policy(policy: str) -> None:
    if policy.removeprefix(PREFIX) not in names():
        raise Misconfigured(f"there is no policy {policy!r}; there are: {', '.join(names())}, and {PREFIX}NAME")


def _draw(path: Path, job: Job, comparison: Comparison, off: list[Event], on: list[Event]) -> None:
    # matplotlib takes a second to import, which only a picture is worth.
    from services.views.picture import Panel, draw

    panels = [
        Panel(f"switching off: {duration(comparison.off.wall_clock_s)}", timeline(off)),
        Panel(
            f"switching on, policy {job.policy}: {duration(comparison.on.wall_clock_s)} "
            f"({100 * comparison.gain:.1f} % less)",
            timeline(on),
        ),
    ]
    draw(panels, path, title=f"turnout demo: {job.steps} steps of {job.batch_size} groups x {job.group_size}")
