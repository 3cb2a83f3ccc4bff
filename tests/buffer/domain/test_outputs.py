"""What a result must be, and when two are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google_crc32c import value

from services.buffer.domain.manifest import trajectory_metrics
from services.buffer.domain.outputs import SMALL_BYTES, InlinePayload, Payload
from services.buffer.domain.trajectory import cut_error
from services.buffer.domain.variance import zero_variance
from services.buffer.wire.outputs import finished_from, kept_outputs, partial_from, same_outputs
from services.runtime.errors import TurnoutError
from tests.buffer.domain.model import World, output
from turnout.buffer.v1 import buffer_pb2 as pb

CONTINUED, ABORTED = pb.SEGMENT_END_CONTINUED, pb.SEGMENT_END_ABORTED


def made(*segments: pb.Segment, **rest: Any) -> pb.Output:
    return pb.Output(segments=segments, **rest)


def changed(message: pb.Output, **fields: Any) -> pb.Output:
    """A copy with other scalar fields."""
    other = pb.Output()
    other.CopyFrom(message)
    for name, new in fields.items():
        setattr(other, name, new)
    return other


def reason(outputs: Sequence[pb.Output], *, partial: bool = False) -> str:
    with pytest.raises(TurnoutError) as caught:
        (partial_from if partial else finished_from)(outputs, "g", 0)
    return f"{caught.value.reason} {caught.value.metadata['field']}"


def test_nothing_generated_is_no_result() -> None:
    assert reason(()) == "EMPTY_TRAJECTORY outputs"
    assert reason((output(), made())) == "EMPTY_TRAJECTORY outputs[1].segments"
    assert reason((output(tokens=0),)) == "EMPTY_TRAJECTORY outputs[0].segments"


def test_numbers_below_zero_are_refused() -> None:
    assert reason((changed(output(), prompt_tokens=-1),)) == "OUT_OF_RANGE outputs[0].prompt_tokens"
    assert reason((made(pb.Segment(tokens=-1)),)) == "OUT_OF_RANGE outputs[0].segments[0].tokens"
    assert reason((output(version=-1),), partial=True) == "OUT_OF_RANGE partial.outputs[0].segments[0].weight_version"


def test_an_end_that_is_not_known_is_refused_whatever_its_sign() -> None:
    for end in (-1, 4, 2**31 - 1):
        outputs = made(pb.Segment(tokens=1), pb.Segment(tokens=1, end=end))  # type: ignore[arg-type]
        assert reason((outputs,)) == "UNKNOWN_ENUM_VALUE outputs[0].segments[1].end"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_rewards_are_finite(reward: float) -> None:
    """NaN compares false with everything, so such a group would slip past every filter."""
    assert reason((output(reward),)) == "REWARD_NOT_FINITE outputs[0].rewards[reward]"
    assert reason((output(), output(reward)), partial=True) == "REWARD_NOT_FINITE partial.outputs[1].rewards[reward]"


def test_an_output_may_end_continued_only_in_a_partial() -> None:
    cut = made(pb.Segment(tokens=5, end=CONTINUED))
    assert reason((cut,)) == "ABORTED_SEGMENT outputs[0].segments[0].end"
    assert partial_from((cut,), "g", 0) is not None
    finished_from((made(*cut.segments, pb.Segment(tokens=1)),), "g", 0)
    aborted = made(pb.Segment(tokens=5, end=ABORTED), pb.Segment(tokens=1))
    assert reason((aborted,), partial=True) == "ABORTED_SEGMENT partial.outputs[0].segments[0].end"


def test_lengths_versions_and_replicas() -> None:
    outputs = (
        made(
            pb.Segment(tokens=2, weight_version=3, replica_id="a"),
            pb.Segment(tokens=0, weight_version=9),
            pb.Segment(tokens=4, weight_version=5, replica_id="b"),
        ),
        made(pb.Segment(tokens=1, replica_id="c")),
    )
    found = finished_from(outputs, "g", 0)
    assert (found.length, found.replica_id) == (7, "c")
    assert found.versions == (3, 5), "a segment without tokens carries no version"
    assert finished_from(outputs[1:], "g", 0).versions is None
    assert finished_from([output(version=0)], "g", 0).versions == (0, 0)
    assert partial_from((), "g", 0) is None
    nothing = partial_from((outputs[0], made()), "g", 0)
    assert nothing is not None
    assert (nothing.length, nothing.replica_id) == (6, "")


@pytest.mark.parametrize("size", [0, 3, SMALL_BYTES, SMALL_BYTES + 1])
def test_what_is_written_down_gives_the_same_again(size: int) -> None:
    """A group that runs is read back from a snapshot with everything that its end is decided by."""
    outputs = (output(0.5, 3, 7, b"x" * size), output(1.5, 4, payload=b"more"), made(pb.Segment(tokens=1)))
    found = finished_from(outputs, "g", 2)
    stored = [(position, Payload("p", payload.size, payload.crc32c)) for position, payload in found.payloads]
    again = kept_outputs(found.encoded, found.small, stored)
    assert (again.versions, again.small) == ((7, 7), found.small)
    assert (again.length, again.replica_id, again.rewards) == (found.length, found.replica_id, found.rewards)
    assert again.small_bytes == found.small_bytes == 4 + (size if size <= SMALL_BYTES else 0)
    assert len(again.payloads) == (size > SMALL_BYTES)


def test_the_same_result_is_the_same_by_content() -> None:
    """A worker that lost its answer sends the result again, perhaps after uploading the bytes a second time."""

    def same(first: Sequence[pb.Output], second: Sequence[pb.Output]) -> bool:
        kept = finished_from(first, "g", 4)
        return same_outputs(4, kept.encoded, kept.payloads, finished_from(second, "g", 4))

    def named(payload_id: str, crc: int = value(b"abc")) -> pb.Output:
        ref = pb.PayloadRef(id=payload_id, size=3, crc32c=crc)
        return made(pb.Segment(tokens=1), payload=pb.Payload(ref=ref, content_type="x"))

    kept = named("payload-1")
    inline = made(pb.Segment(tokens=1), payload=pb.Payload(inline=b"abc", content_type="x"))
    for again in (named("payload-2"), inline):
        assert same((kept,), (again,))
        assert same((again,), (kept,))
    assert same((inline,), (made(pb.Segment(tokens=1, end=pb.SEGMENT_END_COMPLETED), payload=inline.payload),))
    for other in (
        made(pb.Segment(tokens=1)),
        named("payload-1", 78),
        made(pb.Segment(tokens=1), payload=pb.Payload(inline=b"abd", content_type="x")),
        made(pb.Segment(tokens=1), payload=kept.payload, tags={"a": "b"}),
        made(pb.Segment(tokens=1), payload=kept.payload, rewards={"reward": 0.0}),
        changed(kept, prompt_tokens=1),
        made(pb.Segment(tokens=2), payload=kept.payload),
    ):
        assert not same((kept,), (other,))
        assert not same((other,), (kept,))
    assert not same((kept,), (kept, kept))


def test_a_payload_is_kept_with_its_result_only_while_it_is_small() -> None:
    """The memory of the service must not grow with what goes to disk."""
    found = finished_from((output(payload=b"x" * SMALL_BYTES), output(payload=b"x" * (SMALL_BYTES + 1))), "g", 0)
    assert found.small_bytes == SMALL_BYTES
    [(position, payload)] = found.payloads
    assert (position, payload.size, isinstance(payload, InlinePayload)) == (1, SMALL_BYTES + 1, True)
    assert len(found.encoded) < SMALL_BYTES + 200
    partial = partial_from((output(payload=b"x"),), "g", 0)
    assert partial is not None
    assert (partial.small_bytes, len(partial.payloads)) == (0, 1), "the next attempt names it"


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
    for index, versions in enumerate(((2, 4), (5,), (None,))):
        segments = [pb.Segment(tokens=1, weight_version=version) for version in versions]
        world.finish(claim, [made(*segments)], index)
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
