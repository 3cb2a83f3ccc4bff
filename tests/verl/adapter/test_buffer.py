"""verl's custom sampler as its trainer calls it, over a TransferQueue without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from services.runtime.host import ServiceHost
from tests.verl.adapter.hosts import buffer_host
from tests.verl.adapter.queue import FakeQueue
from tests.verl.adapter.rollout import RUN, Rollout, tag

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default")]


@pytest.fixture
def host() -> Iterator[ServiceHost]:
    with buffer_host() as host:
        yield host


def told(host: ServiceHost, **changes: Any) -> dict[str, Any]:
    """What verl's trainer gives to a custom sampler."""
    settings = {"run_id": RUN, "buffer": host.target, "poll_interval": 0.5}
    return {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 2,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": settings,
        "refill_fn": lambda count: None,
        **changes,
    }


def test_it_answers_what_verls_trainer_asks(host: ServiceHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnout.integrations.verl import ReplayBuffer, _buffer

    queue = FakeQueue()
    monkeypatch.setattr(_buffer, "transfer_queue", queue)
    buffer = ReplayBuffer(**told(host))
    assert buffer.poll_interval == 0.5
    with closing(buffer.index):
        assert buffer.get_sampleable_count(3, "train") == 0
        with closing(Rollout(buffer.index, host.target, queue)) as rollout:
            rollout.add("train", 3, ["a", "b", "c"], 1)
            for uid in ("b", "a"):
                rollout.session("train", uid, 0, [1.0])
                rollout.end("train", uid, "finished")
        uids, metrics = buffer.wait_for_sampleable(3, "train", 2)
        assert (set(uids), len(uids), metrics) == ({"a", "b"}, 2, {})
        assert "a" in uids
        assert "c" not in uids
        batch, metrics = buffer.sample(3, "train", 2)
        assert (batch.partition_id, batch.keys, batch.tags, metrics) == ("train", ["b_0_0", "a_0_0"], [tag(3)] * 2, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trainer_mode": "sync"}, "synchronous"),
        ({"max_off_policy_threshold": 0}, "max_off_policy_threshold"),
        ({"max_off_policy_strategy": "hold"}, "max_off_policy_strategy"),
        (
            {"refill_fn": None, "sampler_kwargs": {"run_id": RUN, "buffer": "h:1", "filter_groups_metric": "acc"}},
            "refill_fn",
        ),
    ],
)
def test_a_setting_of_verls_that_cannot_be_followed_is_named(
    host: ServiceHost, changes: dict[str, Any], named: str
) -> None:
    """A run that begins all the same would sample other groups than its user thinks."""
    from turnout.integrations.verl import ReplayBuffer

    with pytest.raises(ValueError, match=named):
        ReplayBuffer(**told(host, **changes))
