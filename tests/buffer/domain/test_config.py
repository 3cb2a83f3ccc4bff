"""What a run may be told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.buffer.domain.caps import Caps
from services.buffer.domain.config import (
    LeaseTimes,
    PartitionConfig,
    RunConfig,
    Staleness,
    Strategy,
    TrainerMode,
)
from services.runtime.errors import Code, TurnoutError


def refused(config: RunConfig) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        config.validate()
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


def test_defaults_are_valid_and_never_stale() -> None:
    config = RunConfig()
    config.validate()
    assert [partition.name for partition in config.partitions] == ["train", "val"]
    assert config.staleness.max_versions is None
    assert config.gate_limit is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"train_batch_size": 0}, "config.train_batch_size"),
        ({"staleness": Staleness(0)}, "config.staleness.max_versions"),
        ({"staleness": Staleness(-1)}, "config.staleness.max_versions"),
        ({"max_attempts": 0}, "config.max_attempts"),
        ({"caps": Caps(max_groups=0)}, "config.caps.max_groups"),
        ({"caps": Caps(max_bytes=-5)}, "config.caps.max_bytes"),
        ({"caps": Caps(max_parked_waits=0)}, "config.caps.max_parked_waits"),
        ({"lease_times": LeaseTimes(claim=0.0)}, "config.lease_times.claim"),
        ({"lease_times": LeaseTimes(sample=-1.0)}, "config.lease_times.sample"),
        ({"lease_times": LeaseTimes(payload=float("nan"))}, "config.lease_times.payload"),
        ({"lease_times": LeaseTimes(payload=float("inf"))}, "config.lease_times.payload"),
        ({"group_filter_metric": ""}, "config.group_filter_metric"),
        ({"partitions": (PartitionConfig(""),)}, "config.partitions[0].name"),
        ({"partitions": (PartitionConfig("a"), PartitionConfig("a"))}, "config.partitions[1].name"),
        ({"partitions": (PartitionConfig("a", group_size=0),)}, "config.partitions[0].default_group_size"),
        ({"partitions": (PartitionConfig("a", group_size=65_537),)}, "config.partitions[0].default_group_size"),
        ({"staleness": Staleness(1, Strategy.GATE)}, "config.train_batch_size"),
    ],
)
def test_a_value_out_of_range_names_its_field(change: dict[str, Any], field: str) -> None:
    """A limit of 0 that divides or gates to nothing must not surface as a hang later."""
    assert refused(replace(RunConfig(), **change)).metadata["field"] == field


def test_a_synchronous_trainer_is_refused() -> None:
    error = refused(RunConfig(trainer_mode=TrainerMode.SYNC))
    assert (error.reason, error.metadata["field"]) == ("SYNC_UNSUPPORTED", "config.trainer_mode")


def test_partitions_and_trainer_mode_are_fixed() -> None:
    old = RunConfig()
    replace(old, max_attempts=3).check_replaces(old)
    for change in ({"partitions": (PartitionConfig("x"),)}, {"trainer_mode": TrainerMode.COLOCATE_ASYNC}):
        with pytest.raises(TurnoutError) as caught:
            replace(old, **change).check_replaces(old)
        assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "IMMUTABLE_FIELD")


def test_the_gate_is_versions_times_batch() -> None:
    assert RunConfig(staleness=Staleness(3, Strategy.GATE), train_batch_size=8).gate_limit == 24
    assert RunConfig(staleness=Staleness(None, Strategy.GATE), train_batch_size=8).gate_limit is None
    assert RunConfig(staleness=Staleness(3, Strategy.DROP), train_batch_size=8).gate_limit is None
