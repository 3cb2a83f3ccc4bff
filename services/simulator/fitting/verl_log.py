"""The metrics that a verl run of the separate async trainer logged, step by step.

Two forms are read: verl's file logger, one `{"step": ..., "data": {...}}` a line, and a CSV file with a column per
metric, as exported from a dashboard. Names are those of verl 0.9.1 (`verl/trainer/ppo/v1`, `metric_utils.py`).

Invariant: a log that exists has at least MIN_STEPS whole steps in their order; times are seconds, lengths tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

# With fewer, a mean over steps says little: rollouts of a step begin in the one before.
MIN_STEPS: Final = 8
# Lengths, rollouts in flight and caches have settled.
_SETTLED: Final = 3
_REQUIRED: Final = ("timing_s/step", "timing_s/gen", "timing_s/update_weights", "response_length/mean")
_PARTS: Final = ("gen", "switch_wait", "switch_to_trainer", "switch_to_rollout", "update_weights", "save_checkpoint")
_SWITCHING: Final = "separate_async/decision/should_switch_to_rollout"


class LogError(ValueError):
    """A file is not such a log; the message names file, line and what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. wait_s: for rollouts, GPUs lent or not. train_s: all that is neither waiting, switching, syncing nor
    saving. lend_s, reclaim_s: None where nothing was switched. trajectories, gpus: None where the log does not say."""

    step: int
    wait_s: float
    train_s: float
    sync_s: float
    lend_s: float | None
    reclaim_s: float | None
    length_mean: float
    clip_ratio: float
    trajectories: int | None
    gpus: int | None


@dataclass(frozen=True, slots=True)
class RunLog:
    """switching: whether the run had switching on."""

    source: str
    switching: bool
    steps: tuple[Step, ...]

    @property
    def settled(self) -> tuple[Step, ...]:
        """Without the first steps, which are not like the others."""
        return self.steps[_SETTLED:]

    @property
    def skipped(self) -> int:
        """How many steps `settled` leaves out."""
        return _SETTLED


def read(path: Path) -> RunLog:
    """The log in `path`. Raises LogError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read: {error}") from error
    rows = _csv_rows(text) if path.suffix == ".csv" else _json_rows(path, text)
    return parse(rows, str(path))


def parse(rows: Iterable[tuple[str, Mapping[str, float]]], source: str) -> RunLog:
    """The log in `rows` of (place, metrics), leaving out those without timings of a step. Raises LogError."""
    steps: dict[int, Step] = {}
    switching = False
    for place, metrics in rows:
        if "timing_s/step" not in metrics:
            continue
        missing = [name for name in _REQUIRED if name not in metrics]
        if missing:
            raise LogError(f"{source}, {place}: {', '.join(missing)} is missing; is it a log of verl's v1 trainer?")
        switching = switching or _SWITCHING in metrics
        step = _step(metrics, len(steps) + 1, f"{source}, {place}")
        steps[step.step] = step  # A resumed run logs the steps after its checkpoint again.
    if len(steps) < MIN_STEPS:
        raise LogError(f"{source}: {len(steps)} steps with timing_s/step; a fit needs at least {MIN_STEPS}")
    return RunLog(source, switching, tuple(steps[number] for number in sorted(steps)))


def _step(metrics: Mapping[str, float], position: int, place: str) -> Step:
    part = {name: metrics.get(f"timing_s/{name}", 0.0) for name in _PARTS}
    train_s = metrics["timing_s/step"] - sum(part.values())
    if train_s <= 0:
        raise LogError(f"{place}: waiting, switching, syncing and saving take longer than the step itself")
    length = metrics["response_length/mean"]
    if length <= 0:
        raise LogError(f"{place}: response_length/mean is {length:g}")
    return Step(
        step=int(metrics.get("training/global_step", position)),
        wait_s=part["gen"] + part["switch_wait"],
        train_s=train_s,
        sync_s=part["update_weights"],
        lend_s=part["switch_to_rollout"] or None,
        reclaim_s=part["switch_to_trainer"] or None,
        length_mean=length,
        clip_ratio=metrics.get("response_length/clip_ratio", 0.0),
        trajectories=_trajectories(metrics),
        gpus=_gpus(metrics),
    )


def _trajectories(metrics: Mapping[str, float]) -> int | None:
    tokens, prompt = metrics.get("perf/total_num_tokens"), metrics.get("prompt_length/mean")
    if tokens is None or prompt is None:
        return None
    return round(tokens / (prompt + metrics["response_length/mean"]))


def _gpus(metrics: Mapping[str, float]) -> int | None:
    names = ("perf/total_num_tokens", "perf/time_per_step", "perf/throughput")
    tokens, step_s, each = (metrics.get(name, 0.0) for name in names)
    return round(tokens / (step_s * each)) if step_s > 0 and each > 0 else None


def _json_rows(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, float]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LogError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise LogError(f"{path}, line {number}: not an object")
        data = row.get("data", row)
        if not isinstance(data, dict):
            raise LogError(f"{path}, line {number}: data is not an object")
        yield f"line {number}", _numbers({"training/global_step": row.get("step"), **data})


def _csv_rows(text: str) -> Iterable[tuple[str, Mapping[str, float]]]:
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        yield f"line {number}", _numbers(row)


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a row; everything else (tables, strings, empty cells) is left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if isfinite(number):
            found[name] = number
    return found
