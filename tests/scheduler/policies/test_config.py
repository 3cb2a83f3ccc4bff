"""What a configuration refuses."""

import math
import pickle
from typing import Any

import pytest

from services.scheduler.policies import FieldError, IncompatibleError, NotFiniteError, OutOfRangeError
from services.scheduler.policies.types import PolicyConfig, RunConfig, SwitchConfig
from tests.scheduler.policies.drive import RUN

RUN_FIELDS: dict[str, Any] = {
    "train_batch_size": 64,
    "mini_batch_size": 16,
    "total_training_steps": 150,
    "hybrid_gpus": 16,
    "standalone_gpus": 8,
}


def test_defaults_are_those_of_verl() -> None:
    """A user who moves over must get the behaviour he had."""
    config = SwitchConfig()
    assert (config.enable_switch, config.switch_threshold_ratio, config.adaptive_switch_threshold) == (False, 0.4, True)
    assert (config.switch_threshold_step_up, config.switch_threshold_step_down) == (0.05, 0.03)
    assert (config.switch_threshold_release_steps, config.switch_cost_window_size) == (2, 3)


@pytest.mark.parametrize("enable_switch", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("switch_threshold_ratio", 0.0, OutOfRangeError),
        ("switch_threshold_ratio", -0.1, OutOfRangeError),
        ("switch_threshold_ratio", 1.0000000002, OutOfRangeError),
        ("switch_threshold_ratio", math.nan, NotFiniteError),
        ("switch_threshold_ratio", math.inf, NotFiniteError),
        ("switch_threshold_ratio", "0.4", OutOfRangeError),
        ("switch_threshold_ratio", True, OutOfRangeError),
        ("switch_threshold_step_up", -0.01, OutOfRangeError),
        ("switch_threshold_step_up", math.nan, NotFiniteError),
        ("switch_threshold_step_down", -0.01, OutOfRangeError),
        ("switch_threshold_step_down", math.inf, NotFiniteError),
        ("switch_threshold_release_steps", 0, OutOfRangeError),
        ("switch_threshold_release_steps", 1.5, OutOfRangeError),
        ("switch_cost_window_size", 0, OutOfRangeError),
        ("switch_cost_window_size", -1, OutOfRangeError),
        ("switch_cost_window_size", True, OutOfRangeError),
        ("adaptive_switch_threshold", "no", OutOfRangeError),
    ],
)
def test_h43_nonsense_is_refused_also_while_switching_is_off(
    enable_switch: bool, field: str, value: object, error: type[FieldError]
) -> None:
    """A value nobody looked at until switching was turned on would fail in the middle of a run."""
    values: dict[str, Any] = {"enable_switch": enable_switch, field: value}
    with pytest.raises(error, match=field) as caught:
        SwitchConfig(**values)
    assert type(caught.value) is error
    assert caught.value.field == field
    assert caught.value.value is value


def test_h43_text_is_not_a_switch() -> None:
    """The text "false" is true to Python: it would turn switching on."""
    nonsense: Any = "false"
    with pytest.raises(OutOfRangeError, match="enable_switch"):
        SwitchConfig(enable_switch=nonsense)


@pytest.mark.parametrize("key", ["switch_treshold_ratio", "colour"])
def test_h43_unknown_key_is_refused_by_name(key: str) -> None:
    """A misspelt key that is accepted does nothing, silently."""
    values: dict[str, Any] = {key: 0.4}
    with pytest.raises(TypeError, match=key):
        SwitchConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"switch_threshold_ratio": 1.0},
        {"switch_threshold_ratio": 1e-9},
        {"switch_threshold_ratio": 1},
        {"switch_threshold_step_up": 0, "switch_threshold_step_down": 0},
        {"switch_threshold_release_steps": 1, "switch_cost_window_size": 1},
    ],
)
def test_edges_of_the_ranges_are_accepted(values: dict[str, Any]) -> None:
    """A check one off refuses a legal run."""
    config = SwitchConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("train_batch_size", 0, OutOfRangeError),
        ("train_batch_size", 64.0, OutOfRangeError),
        ("mini_batch_size", 0, OutOfRangeError),
        ("mini_batch_size", 24, IncompatibleError),
        ("mini_batch_size", 128, IncompatibleError),
        ("total_training_steps", 0, OutOfRangeError),
        ("hybrid_gpus", -1, OutOfRangeError),
        ("standalone_gpus", -1, OutOfRangeError),
        ("idle_tolerance_s", -0.1, OutOfRangeError),
        ("idle_tolerance_s", math.nan, NotFiniteError),
        ("group_size", 0, OutOfRangeError),
        ("max_response_length", 0, OutOfRangeError),
        ("reinstall_within_step", 1, OutOfRangeError),
    ],
)
def test_run_refuses_what_cannot_be(field: str, value: object, error: type[FieldError]) -> None:
    """H46's batch smaller than its sync steps ends here: such a mini-batch is 0 or does not divide the batch."""
    with pytest.raises(error, match=field) as caught:
        RunConfig(**{**RUN_FIELDS, field: value})
    assert type(caught.value) is error
    assert (caught.value.field, caught.value.value) == (field, value)


def test_sync_step_is_derived() -> None:
    """Stored beside the sizes it could contradict them."""
    assert RUN.parameter_sync_step == 4
    assert RunConfig(**RUN_FIELDS, max_response_length=32768).max_response_length == 32768


def test_h43_switching_without_standalone_gpus_is_refused() -> None:
    """While the trainer trains nothing would generate, and the gain formula would divide by zero."""
    run = RunConfig(**{**RUN_FIELDS, "standalone_gpus": 0})
    with pytest.raises(IncompatibleError, match="standalone_gpus must be at least 1 while enable_switch is true"):
        PolicyConfig(run=run, switch=SwitchConfig(enable_switch=True))
    assert PolicyConfig(run=run, switch=SwitchConfig()).run.standalone_gpus == 0


def test_errors_survive_a_pickle() -> None:
    """The simulator runs policies in other processes, and their errors come back pickled."""
    error = pickle.loads(pickle.dumps(OutOfRangeError("switch_threshold_ratio", 2.0, "in (0, 1]")))
    assert isinstance(error, OutOfRangeError)
    assert (error.field, error.value) == ("switch_threshold_ratio", 2.0)
    assert str(error) == "switch_threshold_ratio must be in (0, 1], got 2.0"
