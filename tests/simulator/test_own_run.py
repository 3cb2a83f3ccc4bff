"""Fitting to a run's own events. The events come from the simulator, so what a fit should find is known."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.simulate import simulate_command
from services.simulator import load, simulate
from services.simulator.fitting import FitError
from services.simulator.fitting.own_run import fit_run
from services.simulator.fitting.run_facts import RunFacts, facts_of
from services.views.run_events import write_events
from tests.simulator.recorded import recorded_run

BASE = load("calibrated")
OTHER = BASE.model_copy(
    update={
        "name": "other",
        "steps": 12,
        "topology": BASE.topology.model_copy(update={"hybrid_replicas": 3, "gpus_per_replica": 8}),
        "engine": BASE.engine.model_copy(
            update={"base_s": 0.012, "per_request_s": 0.0001, "prefill_tokens_per_s": 30_000.0}
        ),
        "costs": BASE.costs.model_copy(update={"lend_s": 22.0, "reclaim_s": 9.0, "sync_s": 25.0}),
        "training": BASE.training.model_copy(update={"step_s": 300.0, "log_std": 0.1}),
    }
)


@pytest.fixture(scope="module", params=["off", "verl"])
def facts(request: pytest.FixtureRequest) -> tuple[str, RunFacts]:
    policy: str = request.param
    return policy, facts_of(recorded_run(OTHER, policy, 1))


def test_a_run_tells_its_workload(facts: tuple[str, RunFacts]) -> None:
    """Everything that can be measured is, to a few per cent, and nothing of the base workload is left in it."""
    policy, found = facts
    fitted = fit_run(found, BASE, "found")
    workload = fitted.workload
    assert fitted.policy == policy
    assert workload.batch == OTHER.batch
    assert workload.engine.base_s == pytest.approx(0.012, rel=0.02)
    assert workload.engine.per_request_s == pytest.approx(0.0001, rel=0.02)
    assert workload.engine.prefill_tokens_per_s == pytest.approx(30_000, rel=0.05)
    assert workload.training.step_s == pytest.approx(300, rel=0.05)
    assert workload.costs.sync_s == pytest.approx(25)
    (mode,) = workload.lengths.modes
    assert mode.mean == pytest.approx(OTHER.lengths.modes[0].mean, rel=0.12)
    assert mode.log_std == pytest.approx(0.75, abs=0.08)
    assert mode.between == pytest.approx(0.85, abs=0.05)
    if policy == "verl":
        assert workload.topology == OTHER.topology
        assert workload.costs.lend_s == pytest.approx(22)
        assert workload.costs.reclaim_s == pytest.approx(9)
        assert fitted.assumed == ()


def test_the_fitted_workload_runs_as_the_run_did(facts: tuple[str, RunFacts]) -> None:
    """The purpose: a simulation of the fit takes as long as the run it was fitted to."""
    policy, found = facts
    workload = fit_run(found, OTHER, "found").workload
    hours = [simulate(workload, policy, seed).hours for seed in (5, 6, 7)]
    assert sum(hours) / 3 == pytest.approx(simulate(OTHER, policy, 1).hours, rel=0.05)


def test_what_tells_too_little_is_refused() -> None:
    """A fit of nothing would be the base workload under another name."""
    events = recorded_run(OTHER.model_copy(update={"steps": 2}), "off", 1)
    with pytest.raises(FitError, match="do not begin with the run's opening"):
        fit_run(facts_of(events[1:]), BASE, "found")
    with pytest.raises(FitError, match="0 groups have finished"):
        fit_run(facts_of(events[:1]), BASE, "found")


def test_the_command_fits_to_a_file_of_events(tmp_path: Path) -> None:
    """The file is that of `turnout events`; without --workload nothing has to be known of the run."""
    path = tmp_path / "run.jsonl"
    write_events(recorded_run(OTHER.model_copy(update={"steps": 3}), "verl", 1), path)
    result = CliRunner().invoke(simulate_command, ["--from-run", str(path), "--policy", "verl"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "run.jsonl: 3 steps with policy verl" in result.stderr
    assert "verl" in result.stdout
    both = ["--from-run", str(path), "--from-verl-metrics", str(path)]
    assert "only one of" in CliRunner().invoke(simulate_command, both).stderr
