"""H43: unknown, misspelt and incompatible settings are errors at the start."""

from pathlib import Path
from typing import Any

import pytest

from services.runtime.config import ConfigError, load_settings
from services.runtime.errors import Code
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.world import error_of, run_config, world
from turnout.scheduler.v1 import scheduler_pb2 as pb


def test_h43_a_misspelt_key_of_the_service_is_named(tmp_path: Path) -> None:
    """A setting that nothing reads looks as if it worked."""
    config = tmp_path / "turnout.yaml"
    config.write_text("transition_atempts: 5\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(SchedulerSettings, config=config)
    assert any("transition_atempts" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"disaggregated_rollout": True}, "DISAGGREGATED_ROLLOUT"), ({"standalone_gpus": 0}, "NO_STANDALONE_GPUS")],
)
async def test_h43_what_cannot_go_together_is_refused_at_open_run(changes: dict[str, Any], reason: str) -> None:
    """Found out in the middle of a job, it costs the job."""
    async with world() as w:
        error = await error_of(w.open(run_config(**changes)))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, reason)
        assert w.buffer.runs["run"].epoch == 0
        assert (await w.open(run_config(on=False, **changes))).epoch == 1, "without switching both are fine"


async def test_h43_a_buffer_that_cannot_report_depth_is_refused() -> None:
    """It would give the GPUs back before there is anything to train on."""
    async with world() as w:
        w.buffer.unimplemented.add("GetSampleableCount")
        assert (await error_of(w.open())).reason == "BUFFER_CANNOT_WAIT"


async def test_h43_nonsense_is_refused_also_while_switching_is_off() -> None:
    """It would be found on the day somebody switches on."""
    async with world() as w:
        for switch in (
            pb.SwitchConfig(switch_threshold_ratio=0.0),
            pb.SwitchConfig(switch_threshold_ratio=1.5),
            pb.SwitchConfig(switch_threshold_step_up=-0.1),
            pb.SwitchConfig(switch_threshold_step_down=float("inf")),
            pb.SwitchConfig(switch_threshold_release_steps=0),
        ):
            error = await error_of(w.open(run_config(switch=switch)))
            assert error.code is Code.INVALID_ARGUMENT
            assert error.metadata["field"].startswith("config.switch.switch_")


async def test_h43_an_unknown_policy_lists_those_that_exist() -> None:
    """A typing error must not fall back to some policy."""
    async with world() as w:
        error = await error_of(w.open(run_config(policy="vrel")))
        assert error.reason == "UNKNOWN_POLICY"
        assert "off, fixed, verl" in error.message
