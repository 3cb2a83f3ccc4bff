"""Fitting to what a verl run logged. The logs come from the simulator, so what a fit should find is known."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from click.testing import CliRunner

from services.cli.simulate import simulate_command
from services.simulator import Result, Workload, load, simulate
from services.simulator.draws import draw
from services.simulator.fitting import FitError, LogError, fit, read
from services.simulator.fitting.spread import log_std_of, mean_before_cap
from services.simulator.fitting.verl_log import parse

BASE = load("calibrated")
SLOWER = BASE.model_copy(
    update={
        "name": "slower",
        "steps": 40,
        "engine": BASE.engine.model_copy(update={"base_s": 0.0117, "per_request_s": 0.0000936}),
        "costs": BASE.costs.model_copy(update={"lend_s": 22.0, "reclaim_s": 9.0, "sync_s": 25.0}),
        "training": BASE.training.model_copy(update={"step_s": 300.0, "log_std": 0.1}),
    }
)


def metrics(result: Result, *, switching: bool) -> list[dict[str, float]]:
    """What verl's trainer would have logged of this run, by the names and sums of its source."""
    found: list[dict[str, float]] = []
    for step in result.steps:
        row = {
            "timing_s/gen": step.wait_s,
            "timing_s/update_weights": step.sync_s,
            "timing_s/step": step.train_s + step.wait_s + step.sync_s + step.lent_wait_s + step.lend_s + step.reclaim_s,
            "response_length/mean": 13_000.0,
            "training/global_step": float(step.step),
        }
        if switching:
            row["timing_s/switch_wait"] = step.lent_wait_s
            row["separate_async/decision/should_switch_to_rollout"] = float(step.lend_s > 0)
            if step.lend_s:
                row["timing_s/switch_to_rollout"] = step.lend_s
            if step.reclaim_s:
                row["timing_s/switch_to_trainer"] = step.reclaim_s
        found.append(row)
    return found


def numbered(rows: list[dict[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    return [(f"line {number}", row) for number, row in enumerate(rows, 1)]


def drawn_mean(workload: Workload) -> float:
    """Mean length of what a run of it generates."""
    return float(draw(workload, 1).lengths.mean())


@pytest.fixture(scope="module", params=["off", "verl"])
def logged(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, float]]]:
    policy: str = request.param
    rows = metrics(simulate(SLOWER, policy, 1), switching=policy == "verl")
    mean = drawn_mean(SLOWER)
    return policy, [{**row, "response_length/mean": mean} for row in rows]


def test_a_fit_finds_the_engine_that_the_run_had(logged: tuple[str, list[dict[str, float]]]) -> None:
    """Lengths, costs and training are read off the log; the engine's speed is found from the waits."""
    policy, rows = logged
    found = fit(parse(numbered(rows), "test"), BASE, "found")
    assert found.policy == policy
    assert found.workload.engine.base_s == pytest.approx(SLOWER.engine.base_s, rel=0.06)
    assert found.workload.training.step_s == pytest.approx(300, rel=0.03)
    assert found.workload.costs.sync_s == pytest.approx(25)
    mode = found.workload.lengths.modes[0]
    assert mode.mean == pytest.approx(SLOWER.lengths.modes[0].mean, rel=0.03)
    if policy == "verl":
        assert found.workload.costs.lend_s == pytest.approx(22)
        assert found.workload.costs.reclaim_s == pytest.approx(9)
    else:
        assert any("cost of a lend" in text for text in found.assumed)


@pytest.mark.slow
def test_the_gain_is_known_from_a_run_without_switching() -> None:
    """The purpose: what jit would gain, told from a log of a run that never lent, is near what it gains."""
    costs = SLOWER.costs
    base = BASE.model_copy(update={"costs": costs})
    rows = metrics(simulate(SLOWER, "off", 1), switching=False)
    rows = [{**row, "response_length/mean": drawn_mean(SLOWER)} for row in rows]
    found = fit(parse(numbered(rows), "test"), base, "found").workload.model_copy(update={"steps": 40})

    def gain(workload: Workload) -> float:
        runs = [[simulate(workload, policy, seed).hours for policy in ("off", "jit")] for seed in (3, 4)]
        return fmean(1 - with_jit / off for off, with_jit in runs)

    assert gain(found) == pytest.approx(gain(SLOWER), abs=0.02)


@pytest.mark.parametrize(("log_std", "share"), [(0.5, 0.02), (0.75, 0.06), (1.1, 0.1)])
def test_spread_is_found_from_the_mean_and_the_share_at_the_cap(log_std: float, share: float) -> None:
    """Drawn lengths with the found mean and spread have the logged mean and share."""
    mean = 9_000.0
    found = log_std_of(mean, share, 32_768)
    before = mean_before_cap(mean, found, 32_768)
    drawn = np.random.default_rng(5).lognormal(np.log(before) - found**2 / 2, found, 400_000)
    assert np.minimum(drawn, 32_768).mean() == pytest.approx(mean, rel=0.01)
    assert (drawn >= 32_768).mean() == pytest.approx(share, rel=0.05)
    assert mean_before_cap(mean, log_std, 32_768) > mean


def test_a_log_that_contradicts_the_workload_is_refused() -> None:
    """A fit with the wrong batch or topology would be a number without a meaning."""
    rows = metrics(simulate(SLOWER.model_copy(update={"steps": 10}), "off", 1), switching=False)
    tokens = 128 * 8 * 13_400.0
    wrong = [{**row, "perf/total_num_tokens": tokens, "prompt_length/mean": 400.0} for row in rows]
    with pytest.raises(FitError, match=r"1024 trajectories a step.*64 groups of 8 = 512"):
        fit(parse(numbered(wrong), "test"), BASE, "found")
    gpus = [
        {**row, "perf/total_num_tokens": 1e6, "perf/time_per_step": 100.0, "perf/throughput": 1250.0} for row in rows
    ]
    with pytest.raises(FitError, match="8 GPUs"):
        fit(parse(numbered(gpus), "test"), BASE, "found")
    longer = [{**row, "response_length/mean": 40_000.0} for row in rows]
    with pytest.raises(FitError, match="cap is 32768"):
        fit(parse(numbered(longer), "test"), BASE, "found")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n" * 20, "0 steps with timing_s/step"),
        ("nonsense\n", "line 1: not JSON"),
        ("[1]\n", "line 1: not an object"),
        ('{"step": 1, "data": 3}\n', "data is not an object"),
        (
            '{"step": 1, "data": {"timing_s/step": 5}}\n',
            "timing_s/gen, timing_s/update_weights, response_length/mean is",
        ),
        (
            '{"step": 1, "data": {"timing_s/step": 5, "timing_s/gen": 9, "timing_s/update_weights": 1, '
            '"response_length/mean": 5}}\n',
            "take longer than the step itself",
        ),
    ],
)
def test_what_is_no_such_log_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    """A user sees which line, and what is missing."""
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(LogError, match=message):
        read(path)


def test_both_forms_of_a_log_read_alike(tmp_path: Path) -> None:
    """verl's file logger, and a CSV export with empty cells and columns of text; a resumed step counts once."""
    rows = metrics(simulate(SLOWER.model_copy(update={"steps": 10}), "verl", 1), switching=True)
    rows = [*rows, rows[-1]]
    lines, table = tmp_path / "log.jsonl", tmp_path / "log.csv"
    lines.write_text(
        "".join(
            json.dumps({"step": row["training/global_step"], "data": {**row, "text": "x", "nan": "NaN"}}) + "\n\n"
            for row in rows
        )
    )
    names = sorted({name for row in rows for name in row})
    cells = [",".join(repr(row[name]) if name in row else "" for name in names) + ",name" for row in rows]
    table.write_text("\n".join([",".join([*names, "run"]), *cells]))
    assert read(lines).steps == read(table).steps
    assert len(read(lines).steps) == 10
    assert read(lines).switching


def test_the_command_prints_a_band(tmp_path: Path) -> None:
    """A user learns the gain, how sure it is, and what is assumed."""
    path = tmp_path / "log.jsonl"
    tiny = load("tiny-batch").model_copy(update={"steps": 12})
    rows = metrics(simulate(tiny, "off", 1), switching=False)
    mean = drawn_mean(tiny)
    path.write_text("".join(json.dumps({**row, "response_length/mean": mean}) + "\n" for row in rows))
    options = ["--workload", "tiny-batch", "--from-verl-metrics", str(path), "--policy", "verl", "--steps", "4"]
    result = CliRunner().invoke(simulate_command, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "verl saves" in result.stdout
    assert "under the other assumptions" in result.stdout
    assert "assumed:" in result.stderr
    several = CliRunner().invoke(simulate_command, ["--workload", "all", "--from-verl-metrics", str(path)])
    assert several.exit_code == 2
    assert "fits one workload" in several.stderr
