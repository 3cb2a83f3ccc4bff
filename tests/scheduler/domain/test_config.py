"""What a run may be configured with."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from services.runtime.errors import Code, TurnoutError
from services.scheduler.domain.config import RunConfig, check
from services.scheduler.domain.holdings import Gpu
from services.scheduler.policies.config import SwitchConfig

ON = SwitchConfig(enable_switch=True)
GOOD = RunConfig(
    switch=ON,
    policy="verl",
    train_batch_size=64,
    parameter_sync_step=4,
    mini_batch_size=16,
    total_training_steps=10,
    hybrid_gpus=4,
    standalone_gpus=2,
)


def refusal(**changes: Any) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        check(replace(GOOD, **changes))
    return caught.value


def test_a_good_configuration_passes_and_says_all_it_is() -> None:
    """A report of a run is worth nothing without the defaults that were in force."""
    assert check(GOOD) is GOOD
    said = json.loads(GOOD.as_json())
    assert said["switch"]["switch_threshold_ratio"] == 0.4
    assert said["idle_tolerance_s"] == 2.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train_batch_size": 65}, "config.train_batch_size"),
        ({"train_batch_size": 0, "mini_batch_size": 0}, "config.mini_batch_size"),
        ({"parameter_sync_step": 0, "train_batch_size": 0}, "config.parameter_sync_step"),
        ({"total_training_steps": 0}, "config.total_training_steps"),
        ({"hybrid_gpus": -1}, "config.hybrid_gpus"),
        ({"standalone_gpus": -1}, "config.standalone_gpus"),
        ({"idle_tolerance_s": math.nan}, "config.idle_tolerance"),
        ({"num_warmup_batches": math.inf}, "config.num_warmup_batches"),
        ({"num_warmup_batches": -0.5}, "config.num_warmup_batches"),
        ({"num_warmup_batches": 1e308}, "config.num_warmup_batches"),
        ({"num_warmup_batches": 1e18}, "config.num_warmup_batches"),
        ({"group_size": 0}, "config.group_size"),
        ({"max_response_tokens": 0}, "config.max_response_tokens"),
        ({"trainer_lease_s": 0.0}, "config.trainer_lease"),
        ({"engine_timeout_s": 0.0}, "config.engine_timeout"),
        ({"partition": "a\nb"}, "config.partition"),
        ({"policy": "vrel"}, "config.policy"),
        ({"hybrid_devices": (Gpu("n0", "GPU-0"), Gpu("n0", ""))}, "config.hybrid_devices[1].uuid"),
        ({"hybrid_devices": (Gpu("", "GPU-0"),)}, "config.hybrid_devices[0].node"),
        ({"hybrid_devices": (Gpu("n0", "G"), Gpu("n1", "G"), Gpu("n0", "G"))}, "config.hybrid_devices[2]"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """A refusal that does not name the field sends the user through the whole configuration."""
    error = refusal(**changes)
    assert error.code is Code.INVALID_ARGUMENT
    assert error.metadata["field"] == field


def test_an_unknown_policy_is_answered_with_those_that_exist() -> None:
    """ "vrel" must not run as some default."""
    error = refusal(policy="vrel")
    assert error.reason == "UNKNOWN_POLICY"
    assert "verl" in error.message
    assert "fixed" in error.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"disaggregated_rollout": True}, "DISAGGREGATED_ROLLOUT"), ({"standalone_gpus": 0}, "NO_STANDALONE_GPUS")],
)
def test_what_switching_cannot_do_is_refused_only_with_switching_on(changes: dict[str, Any], reason: str) -> None:
    """Both are fine without switching, and neither may be accepted and then silently do nothing."""
    error = refusal(**changes)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, reason)
    check(replace(GOOD, switch=SwitchConfig(), **changes))


def test_without_hybrid_gpus_nothing_switches() -> None:
    """verl turns the switch off then; a policy that asks for a lend would ask for what is not there."""
    config = check(replace(GOOD, hybrid_gpus=0))
    assert not config.switching
    assert not config.policy_config.switch.enable_switch


def test_warm_up_may_be_a_fraction_of_a_batch() -> None:
    """1.5 batches are 96 prompts, and half a prompt is none."""
    assert replace(GOOD, num_warmup_batches=1.5).warmup_groups == 96
    assert replace(GOOD, num_warmup_batches=0.03).warmup_groups == 1
