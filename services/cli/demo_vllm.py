"""`turnout demo-vllm`: a real model learns through real vLLM engines, one of which is lent and taken back.

Invariants: stdout carries the table and the path of the picture, or with --json one JSON object and nothing else;
progress goes to stderr; whatever ends the command, its processes and temporary files are gone when it returns. Exit
code 1 if a process failed, or if a figure is not as it has to be; the figures are printed all the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed, Misconfigured
from services.cli.running import run_async
from services.cli.targets import forget_security
from services.demo.events import Event
from services.demo.prompts import PromptsError
from services.learner.figures import Figures, figures
from services.learner.job import HYBRID, Job
from services.learner.supply import load, sample_file
from services.processes.child import ChildFailed
from services.views.demo_progress import DemoProgress, demo_progress
from services.views.table import bars, duration
from services.views.timeline import timeline

_DEFAULT: Final = Job()
PICTURE: Final = "turnout-demo-vllm.png"
SEEDS: Final = 3
_MIB: Final = 2**20
_ROWS: Final[dict[str, Callable[[Figures], str]]] = {
    "reward of each step": lambda one: bars(one.rewards),
    "first, last step": lambda one: f"{one.rewards[0]:.3f}, {one.rewards[-1]:.3f}",
    "last quarter above the first": lambda one: f"{one.gain:+.3f}",
    "steps, lends": lambda one: f"{one.steps}, {one.lends}",
    "syncs, of equal output": lambda one: f"{one.syncs}, {one.syncs_with_equal_output}",
    "lost groups": lambda one: str(one.lost_groups),
    "worker's memory awake": lambda one: f"{one.worker_rss_awake / _MIB:.0f} MiB",
    "asleep": lambda one: f"{one.worker_rss_asleep / _MIB:.0f} MiB",
    "fell by, of the freed storages": lambda one: f"{100 * one.freed_share:.0f} %",
}


@click.command(
    "demo-vllm",
    help=with_examples(
        "Run a GRPO job on this machine's CPU: a tiny transformer with random weights learns by rewards alone, its "
        "answers sampled by two vLLM engines. The trainer's own engine sleeps while it trains, which frees its "
        "memory, and is lent after each step. Needs vLLM: 'make demo-vllm' installs one and runs this.",
        "turnout demo-vllm",
        "turnout demo-vllm --prompts mine.jsonl",
        "turnout demo-vllm --json > figures.json     three seeds",
    ),
)
@click.option("--seed", type=click.IntRange(0, 65_535), default=0, show_default=True, help="First seed.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    help=f"How many seeds, one after another. Default: {SEEDS} with --json, or 1.",
)
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=_DEFAULT.steps, show_default=True, help="Training steps."
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help='Prompts, one JSON object per line: {"id": "a", "prompt": "say a"}. Default: the sample that ships.',
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write every event to this file, one JSON object per line.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=PICTURE,
    show_default=True,
    help="Where to write reward, memory and timeline of the first seed (PNG).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def demo_vllm(
    seed: int,
    seeds: int | None,
    steps: int,
    prompts: Path | None,
    events: Path | None,
    picture: Path,
    as_json: bool,
) -> None:
    """Run the job."""
    forget_security()
    if importlib.util.find_spec("vllm") is None:
        raise Misconfigured("vLLM is not installed here; 'make demo-vllm' installs one for the CPU and runs this")
    prompts_path = (prompts or sample_file()).absolute()
    try:
        load(prompts_path)
    except PromptsError as error:
        raise Misconfigured(str(error)) from error
    for path in (picture, events):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise Misconfigured(f"{path}: cannot be written: no such directory, or not a writable one")
    count = seeds or (SEEDS if as_json else 1)
    made: list[Figures] = []
    said = ""
    if events is not None:
        events.write_text("", encoding="utf-8")
    with demo_progress(Console(stderr=True, highlight=False), seeds=count, steps=steps) as progress:
        for number in range(count):
            job = replace(_DEFAULT, seed=seed + number, steps=steps)
            recorded = _run(job, prompts_path, progress, events)
            made.append(figures(job, recorded))
            if number == 0:
                said = _answers(recorded)
                _draw(picture, made[0], recorded)
    if as_json:
        click.echo(json.dumps({"seeds": [one.to_dict() for one in made]}))
    else:
        console = Console(highlight=False)
        console.print(_table(made))
        console.print(said, markup=False)
    click.echo(f"reward, memory and timeline: {picture}", err=as_json)
    faults = [fault for one in made for fault in one.faults()]
    if faults:
        raise CommandFailed("the job did not go as it has to", faults)


def _run(job: Job, prompts: Path, progress: DemoProgress, events: Path | None) -> list[Event]:
    # torch and transformers take many seconds to import, and are not there without vLLM.
    from services.learner.recorder import MemoryRecorder
    from services.learner.run import run_job

    progress.begin(job.seed, "on")
    recorder = MemoryRecorder(job, progress.take)
    try:
        run_async(run_job(job, prompts, recorder))
    except ChildFailed as failed:
        raise CommandFailed(f"{failed} while seed {job.seed} ran", failed.last_lines) from failed
    finally:
        if events is not None:
            with events.open("a", encoding="utf-8") as file:
                file.writelines(event.to_line(job.seed, "on") + "\n" for event in recorder.events)
    progress.end()
    return recorder.events


def _answers(events: list[Event]) -> str:
    """Return what the model answered to one prompt before it learned anything, and in the end."""
    syncs = [event["answers"] for event in events if event.name == "synced"]
    prompt, first = next(iter(syncs[0].items()))
    return f'"{prompt}" was answered "{first}" before the first step, and "{syncs[-1][prompt]}" after the last one'


def _table(made: list[Figures]) -> Table:
    table = Table(title="a model learns through engines that are lent", title_justify="left", title_style="bold")
    table.add_column("")
    for one in made:
        table.add_column(f"seed {one.seed}", justify="right", no_wrap=True)
    for name, value in _ROWS.items():
        table.add_row(name, *(value(one) for one in made))
    return table


def _draw(path: Path, of: Figures, events: list[Event]) -> None:
    # matplotlib takes a second to import, which only a picture is worth.
    from services.views.learning import draw_learning
    from services.views.picture import Panel

    line = timeline(events)
    memory = [
        (event.at, event["bytes"]) for event in events if event.name == "memory" and event["replica_id"] == HYBRID
    ]
    draw_learning(
        path,
        title=f"turnout demo-vllm: seed {of.seed}, {of.steps} steps",
        rewards=of.rewards,
        memory=memory,
        panel=Panel(f"{of.lends} lends in {duration(line.end)}", line),
    )
