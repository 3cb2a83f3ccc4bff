"""What a result must be, and when two are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.buffer.domain.manifest import trajectory_metrics
from services.buffer.domain.outputs import (
    InlinePayload,
    Output,
    Payload,
    Segment,
    SegmentEnd,
    check_finished,
    check_partial,
    last_replica,
    same_outputs,
    total_length,
    version_bounds,
)
from services.buffer.domain.trajectory import cut_error
from services.buffer.domain.variance import zero_variance
from services.runtime.errors import TurnoutError
from tests.buffer.domain.model import World, output


def reason(outputs: tuple[Output, ...], *, partial: bool = False) -> str:
    with pytest.raises(TurnoutError) as caught:
        (check_partial if partial else check_finished)(outputs)
    return f"{caught.value.reason} {caught.value.metadata['field']}"


def test_nothing_generated_is_no_result() -> None:
    assert reason(()) == "EMPTY_TRAJECTORY outputs"
    assert reason((output(), Output(()))) == "EMPTY_TRAJECTORY outputs[1].segments"
    assert reason((output(tokens=0),)) == "EMPTY_TRAJECTORY outputs[0].segments"


def test_numbers_below_zero_are_refused() -> None:
    assert reason((replace(output(), prompt_tokens=-1),)) == "OUT_OF_RANGE outputs[0].prompt_tokens"
    assert reason((Output((Segment(-1),)),)) == "OUT_OF_RANGE outputs[0].segments[0].tokens"
    assert reason((output(version=-1),), partial=True) == "OUT_OF_RANGE partial.outputs[0].segments[0].weight_version"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rewards_are_finite(value: float) -> None:
    """NaN compares false with everything, so such a group would slip past every filter."""
    assert reason((output(value),)) == "REWARD_NOT_FINITE outputs[0].rewards[reward]"


def test_an_output_may_end_continued_only_in_a_partial() -> None:
    cut = Output((Segment(5, end=SegmentEnd.CONTINUED),))
    assert reason((cut,)) == "ABORTED_SEGMENT outputs[0].segments[0].end"
    check_partial((cut,))
    check_finished((Output((*cut.segments, Segment(1))),))


def test_lengths_versions_and_replicas() -> None:
    outputs = (
        Output((Segment(2, 3, replica_id="a"), Segment(0, 9), Segment(4, 5, replica_id="b"))),
        Output((Segment(1, None, replica_id="c"),)),
    )
    assert total_length(outputs) == 7
    assert version_bounds(outputs) == (3, 5), "a segment without tokens carries no version"
    assert version_bounds(outputs[1:]) is None
    assert last_replica(outputs) == "c"
    assert last_replica(()) == ""
    assert last_replica((Output(()),)) == ""


def test_the_same_result_is_the_same_by_content() -> None:
    """A worker that lost its answer sends the result again, perhaps after uploading the bytes a second time."""
    kept = Output((Segment(1),), payload=Payload("payload-1", 3, 77, content_type="x"))
    again = replace(kept, payload=Payload("payload-2", 3, 77, content_type="x"))
    inline = replace(kept, payload=InlinePayload(b"abc", 77, "x"))
    assert same_outputs((kept,), (again,))
    assert same_outputs((kept,), (inline,))
    for other in (
        replace(kept, payload=None),
        replace(kept, payload=Payload("payload-1", 3, 78, content_type="x")),
        replace(kept, tags={"a": "b"}),
        replace(kept, rewards={"reward": 0.0}),
        replace(kept, prompt_tokens=1),
        replace(kept, segments=(Segment(2),)),
    ):
        assert not same_outputs((kept,), (other,))
        assert not same_outputs((other,), (kept,))
    assert not same_outputs((kept,), (kept, kept))


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 1.0], True),
        ([0.0, -0.0], True),
        ([0.1 + 0.2, 0.3], True),
        ([sum([0.1] * 10), 1.0, 1.0], True),
        ([0.3, 0.3001], False),
        ([1e308, -1e308], False),
        ([1e-300, 0.0], True),
        ([1e6, 1e6 + 1.0], False),
    ],
)
def test_zero_variance_survives_rounding(values: list[float], flat: bool) -> None:
    """A standard deviation of exactly zero would let 0.1 + 0.2 beside 0.3 pass as a signal."""
    assert zero_variance(values) is flat


def test_metrics_of_a_batch_are_verls() -> None:
    """Step 6 trains on weights stamped 5: a trajectory of versions 2 to 4 spans 3, lags 1, and 3 at worst."""
    world = World()
    world.add("g", step=2, size=3)
    [claim] = world.claim(3)
    world.finish(claim, [Output((Segment(1, 2), Segment(1, 4)))], 0)
    world.finish(claim, [Output((Segment(1, 5),))], 1)
    world.finish(claim, [Output((Segment(1, None),))], 2)
    assert trajectory_metrics(world.partition.groups.values(), 6) == {
        "training/off_policy/trajectory_spans/mean": 2.0,
        "training/off_policy/trajectory_spans/max": 3,
        "training/off_policy/trajectory_spans/min": 1,
        "training/off_policy/trajectory_staleness/mean": 0.5,
        "training/off_policy/trajectory_staleness/max": 1,
        "training/off_policy/trajectory_staleness/min": 0,
        "training/off_policy/trajectory_staleness_worst/mean": 1.5,
        "training/off_policy/trajectory_staleness_worst/max": 3,
        "training/off_policy/trajectory_staleness_worst/min": 0,
    }
    assert trajectory_metrics([], 6) == {}


def test_an_error_text_is_cut_between_characters() -> None:
    assert cut_error("short") == "short"
    cut = cut_error("é" * 5000)
    assert len(cut.encode()) == 1024
    assert set(cut) == {"é"}
