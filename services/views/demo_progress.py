"""How the demo tells on stderr that it goes on: a live bar on a terminal, one line per step elsewhere.

Invariants: nothing is written to stdout; without a terminal the output holds no control characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.views.table import duration
from services.views.timeline import TimedEvent

_WORDS: Final = {
    "training": "[green]training[/]",
    "waiting": "[red]waiting for rollouts[/]",
    "updating": "[yellow]moving weights[/]",
}


class DemoProgress:
    """Follows the jobs of a demo. Made by `demo_progress`."""

    def __init__(self, console: Console, bar: Progress | None, *, seeds: int, steps: int) -> None:
        self._console = console
        self._bar = bar
        self._seeds = seeds
        self._steps = steps
        self._task: TaskID | None = None
        self._heading = ""
        self._trained = 0
        self._lent = False

    def begin(self, seed: int, mode: str) -> None:
        """A job is about to start."""
        which = f"seed {seed}, " if self._seeds > 1 else ""
        self._heading = f"{which}switching {mode}"
        self._trained, self._lent = 0, False
        if self._bar is not None:
            self._task = self._bar.add_task(self._heading, total=self._steps, state="starting processes")
        else:
            self._console.print(f"{self._heading}: starting processes", markup=False, soft_wrap=True)

    def take(self, event: TimedEvent) -> None:
        """Something happened in the job."""
        if event.name == "group_trained":
            self._trained += 1
        elif event.name == "lend":
            self._lent = True
        elif event.name == "reclaim":
            self._lent = False
        elif event.name == "trainer" and self._bar is not None and self._task is not None:
            lent = ", GPUs lent" if self._lent else ""
            state = f"step {event['step']}: {_WORDS.get(event['state'], '')}{lent}, {self._trained} groups trained"
            self._bar.update(self._task, state=state)
        elif event.name == "step_ended":
            self._step_ended(event)

    def end(self) -> None:
        """The job is done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps, state="done")
            self._bar.stop_task(self._task)

    def _step_ended(self, event: TimedEvent) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event["step"])
        else:
            line = f"{self._heading}: step {event['step']} of {self._steps} after {duration(event.at)} of the job"
            self._console.print(f"{line}, {self._trained} groups trained", markup=False, soft_wrap=True)


@contextmanager
def demo_progress(console: Console, *, seeds: int, steps: int) -> Iterator[DemoProgress]:
    """Show progress on `console` for as long as the block runs."""
    if not console.is_terminal:
        yield DemoProgress(console, None, seeds=seeds, steps=steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield DemoProgress(console, bar, seeds=seeds, steps=steps)
