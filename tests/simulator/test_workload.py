"""Workloads: built in, from a file, and wrong ones."""

from pathlib import Path

import pytest

from services.simulator import WorkloadError, load, names, parse
from services.simulator.profile import factor
from services.simulator.workload import Jump, Profile, Ramp, Steady, Wave

GOOD = """
name: mine
description: A small one.
steps: 4
topology: {hybrid_replicas: 2, standalone_replicas: 1}
lengths: {cap: 1000, modes: [{mean: 300}]}
"""

WANTED = {
    "calibrated",
    "demo",
    "bimodal",
    "bimodal-costly",
    "heavy-tail",
    "length-growing",
    "length-shrinking",
    "node-added",
    "node-lost",
    "noisy-training",
    "oscillating-length",
    "oscillating-speed",
    "ratio-1-1",
    "ratio-1-2",
    "ratio-4-1",
    "slow-drift",
    "slow-prefill",
    "sudden-doubling",
    "switch-cost-120s",
    "switch-cost-40s",
    "switch-cost-5s",
    "tiny-batch",
    "train-bound",
}


def test_all_built_in_workloads_load_under_their_own_name() -> None:
    """A workload whose file says another name would report results under it."""
    assert set(names()) == WANTED
    assert names()[0] == "calibrated"
    for name in names():
        assert load(name).name == name
        load(name).policy_config()


def test_workload_from_a_file(tmp_path: Path) -> None:
    """Users bring their own."""
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD, encoding="utf-8")
    assert load(str(file)).batch.groups == 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD + "stepps: 5\n", "stepps: Extra inputs"),
        (GOOD.replace("mean: 300", "mean: 300, sigma: 1"), "lengths.modes.0.sigma: Extra inputs"),
        (GOOD.replace("cap: 1000", "cap: -1"), "lengths.cap"),
        (GOOD.replace("mean: 300", "mean: .nan"), "lengths.modes.0.mean"),
        (GOOD + "batch: {groups: 64, mini_batch: 15}\n", "batch: Value error, mini_batch 15 does not divide groups 64"),
        (GOOD + "engine: {speed: {kind: saw}}\n", "engine.speed"),
        (
            GOOD + "events:\n- {at: 3, hybrid_replicas: 1, standalone_replicas: 1}\n"
            "- {at: 2, hybrid_replicas: 1, standalone_replicas: 1}\n",
            "events are not in the order of their steps",
        ),
        ("- a\n- b\n", "is not a mapping"),
        ("a: [", "is not YAML"),
        ("", "is not a mapping"),
    ],
)
def test_a_wrong_workload_is_refused_by_the_name_of_the_field(text: str, problem: str) -> None:
    """A misspelt key that is ignored simulates something else than its author believes."""
    with pytest.raises(WorkloadError, match=r"^mine\.yaml: ") as caught:
        parse(text, "mine.yaml")
    assert problem in str(caught.value)


def test_unknown_name_lists_the_names() -> None:
    """A typing error is no missing file."""
    with pytest.raises(WorkloadError, match=r"neither a file nor one of calibrated, bimodal"):
        load("calibratd")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """An operating system error alone does not say which workload was meant."""
    with pytest.raises(WorkloadError, match=r"gone.yaml: cannot be read"):
        load(str(tmp_path / "gone.yaml"))


@pytest.mark.parametrize(
    ("profile", "step", "expected"),
    [
        (Steady(), 7, 1.0),
        (Ramp(kind="ramp", to=4.0), 1, 1.0),
        (Ramp(kind="ramp", to=4.0), 6, 2.0),
        (Ramp(kind="ramp", to=4.0), 11, 4.0),
        (Jump(kind="jump", at=5, to=2.0), 4, 1.0),
        (Jump(kind="jump", at=5, to=2.0), 5, 2.0),
        (Wave(kind="wave", shape="square", period=4, low=0.5, high=1.5), 2, 1.5),
        (Wave(kind="wave", shape="square", period=4, low=0.5, high=1.5), 3, 0.5),
        (Wave(kind="wave", shape="sine", period=4, low=0.5, high=1.5), 2, 1.5),
        (Wave(kind="wave", shape="sine", period=4, low=0.5, high=1.5), 3, 1.0),
        (Jump(kind="jump", at=1, to=2.0), 0, 2.0),
    ],
)
def test_profiles(profile: Profile, step: int, expected: float) -> None:
    """Of 11 steps. Step 0, the warm-up, counts as the first."""
    assert factor(profile, step, 11) == pytest.approx(expected)
