"""The index over TransferQueue that verl's trainer reads, without verl."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.runtime.host import ServiceHost
from tests.verl.adapter.hosts import buffer_host
from tests.verl.adapter.queue import FakeQueue, Score
from tests.verl.adapter.rollout import RUN, Rollout, tag
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, StaleEpoch
from turnout.integrations.verl._index import Index, Rules
from turnout.integrations.verl._setup import VerlSetup

DROP = Rules(max_versions=2, wait=False, metric="reward", refill=True)


class Moments:
    """A clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def host() -> Iterator[ServiceHost]:
    with buffer_host() as host:
        yield host


@contextmanager
def opened(host: ServiceHost, queue: FakeQueue, rules: Rules = DROP, **rest: Any) -> Iterator[Rollout]:
    index = Index(RUN, rules, queue, BufferClient(host.target), **rest)
    index.start()
    rollout = Rollout(index, host.target, queue)
    try:
        yield rollout
    finally:
        rollout.close()
        index.close()


def finish(rollout: Rollout, uid: str, *rewards: float, partition: str = "train") -> None:
    rollout.start(partition, uid)
    for session, reward in enumerate(rewards):
        rollout.session(partition, uid, session, [reward])
    rollout.end(partition, uid, "finished")


def test_a_group_is_sampleable_only_after_it_ended_in_transferqueue(host: ServiceHost) -> None:
    """Sampled before, its worker would write its status again, under a key that nobody ever clears."""
    queue = FakeQueue()
    with opened(host, queue) as rollout:
        rollout.add("train", 1, ["a"], 2)
        rollout.start("train", "a")
        for session in (0, 1):
            rollout.session("train", "a", session, [float(session)])
        assert rollout.index.depth(1, "train") == 0
        rollout.end("train", "a", "finished")
        assert rollout.index.depth(1, "train") == 1


def test_a_sample_gives_keys_and_tags_of_transferqueue_and_clears_the_prompts(host: ServiceHost) -> None:
    """The outputs stay for the trainer, which clears them itself; a prompt left there would be issued again."""
    queue = FakeQueue()
    with opened(host, queue) as rollout:
        rollout.add("train", 1, ["a", "b_with_under_score"], 2)
        finish(rollout, "b_with_under_score", 0.0, 1.0)
        finish(rollout, "a", 0.0, 1.0)
        uids, metrics = rollout.index.sample(1, "train", 1)
        keys, tags = rollout.index.materialize("train", uids)
        assert (uids, keys, metrics) == (["a"], ["a_0_0", "a_1_0"], {})
        assert tags == [tag(1), tag(1)]
        assert set(queue.tags["train"]) == {
            *keys,
            "b_with_under_score",
            "b_with_under_score_0_0",
            "b_with_under_score_1_0",
        }


def test_what_is_evicted_is_cleared_and_refilled_by_verl_on_the_waiting_thread(host: ServiceHost) -> None:
    """Two evicted, two refilled: verl submits them itself, and its batches come back through `add`."""
    queue, asked, threads = FakeQueue(), list[int](), set[int]()

    def refill(count: int) -> None:
        threads.add(threading.get_ident())
        asked.append(count)
        for number in range(count):
            rollout.add("train", 5, [f"new-{len(asked)}-{number}"], 1)
            finish(rollout, f"new-{len(asked)}-{number}", 0.0)

    with opened(host, queue, refill_fn=refill) as rollout:
        rollout.add("train", 1, ["stale", "flat", "failed"], 2)
        finish(rollout, "stale", 0.0, 1.0)
        finish(rollout, "flat", 1.0, 1.0)
        rollout.session("train", "failed", 0, [1.0])
        rollout.fail("train", "failed")
        rollout.end("train", "failed", "failure")
        metrics = rollout.index.wait(5, "train", 3)
        ledger = rollout.index.buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition="train"))
        assert sum(asked) == 3
        assert threads == {threading.get_ident()}
        assert (ledger.evicted, ledger.credits_created, ledger.credits_paid) == (3, 3, 3)
        assert metrics["training/off_policy/evicted_samples"] == 2
        assert metrics["training/filter_groups/evicted_samples"] == 1
        assert metrics["training/rollout_failure/evicted_samples"] == 1
        assert all(key.startswith("new-") for key in queue.tags["train"])


def test_the_index_is_rebuilt_from_what_transferqueue_holds(host: ServiceHost) -> None:
    """A second truth about what was finished would disagree with verl's checkpoint after the first crash."""
    queue = FakeQueue()
    with opened(host, queue) as rollout:
        rollout.add("train", 1, ["lost-with-the-index"], 1)
    for uid, status, step in (("old", "finished", 3), ("young", "finished", 4), ("flat", "finished", 4)):
        queue.put(uid, "train", {"is_prompt": True, "status": status, "global_steps": step})
        for session in (0, 1):
            reward = 1.0 if uid == "flat" else float(session)
            queue.put(f"{uid}_{session}_0", "train", tag(step), {"rm_scores": Score(reward)})
    queue.put("failed", "train", {"is_prompt": True, "status": "failure", "global_steps": 4})
    queue.put("flying", "train", {"is_prompt": True, "status": "running", "global_steps": 4})
    with opened(host, queue) as rollout:
        assert rollout.index.depth(4, "train") == 2
        rollout.add("train", 5, ["flying"], 1)
        finish(rollout, "flying", 1.0)
        assert rollout.index.sample(4, "train", 3)[0] == ["old", "young", "flying"]


def test_a_large_queue_is_rebuilt_in_several_calls(host: ServiceHost) -> None:
    """A call carries so many results; a checkpoint of verl holds as many as it likes."""
    queue = FakeQueue()
    for number in range(700):
        queue.put(f"g{number}", "train", {"is_prompt": True, "status": "finished", "global_steps": 1})
        for session in range(4):
            queue.put(f"g{number}_{session}_0", "train", tag(1), {"rm_scores": Score(float(session))})
    with opened(host, queue) as rollout:
        assert rollout.index.depth(1, "train") == 700


def test_a_finished_group_that_lost_a_session_is_sampled_with_the_others(host: ServiceHost) -> None:
    """An agent loop may return nothing for a session; verl trains on the siblings."""
    queue = FakeQueue()
    with opened(host, queue) as rollout:
        rollout.add("train", 1, ["a", "empty"], 2)
        for uid, first in (("a", [1.0, 0.5]), ("empty", [])):
            rollout.session("train", uid, 0, first)
            rollout.session("train", uid, 1, [])
            rollout.end("train", uid, "finished")
        assert rollout.index.depth(1, "train") == 1
        uids, _ = rollout.index.sample(1, "train", 1)
        assert rollout.index.materialize("train", uids)[0] == ["a_0_0", "a_0_1"]


def test_a_lost_report_is_found_while_a_wait_lasts(host: ServiceHost) -> None:
    """A worker that could not reach the buffer in time must not leave the trainer waiting for ever."""
    queue, clock = FakeQueue(), Moments()
    with opened(host, queue, look_interval=30.0, now=clock) as rollout:
        rollout.add("train", 1, ["a", "b"], 2)
        for uid in ("a", "b"):
            rollout.session("train", uid, 0, [1.0])
            rollout.session("train", uid, 1, [0.0])
        rollout.end("train", "a", "finished", told=False)
        rollout.end("train", "b", "failure", told=False)
        for moment, depth in ((29.0, 0), (30.0, 0), (60.0, 1)):
            clock.now = moment
            rollout.index.look("train")
            assert rollout.index.depth(1, "train") == depth


class OnlyTags(FakeQueue):
    """Counts looks, and has no payload that it would give."""

    looks = 0

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        self.looks += 1
        return super().kv_list(partition_id)

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any) -> dict[str, Any]:
        raise AssertionError(f"{select_fields} were read")


def test_no_payload_is_read_or_copied(host: ServiceHost) -> None:
    """TransferQueue holds what verl trains on, once: tags alone make the index, also anew, and give a batch."""
    queue, rules = OnlyTags(), Rules(max_versions=2, wait=False, metric=None, refill=False)
    for uid in ("old", "young"):
        queue.put(uid, "train", {"is_prompt": True, "status": "finished", "global_steps": 3})
        queue.put(f"{uid}_0_0", "train", tag(3), {"responses": "tensors"})
    with opened(host, queue, rules) as rollout:
        rollout.add("train", 3, ["new"], 1)
        finish(rollout, "new", 1.0)
        outputs = [
            output
            for group in rollout.index._groups("train")
            for trajectory in group.trajectories
            for output in trajectory.outputs
        ]
        assert len(outputs) == 3
        assert not any(output.HasField("payload") for output in outputs)
        uids, _ = rollout.index.sample(3, "train", 3)
        assert rollout.index.materialize("train", uids)[0] == ["old_0_0", "young_0_0", "new_0_0"]


def test_a_wait_ends_by_the_workers_report_and_nobody_looks_meanwhile(host: ServiceHost) -> None:
    """verl reads all tags every two seconds: a step that is ready waits for the next look, and each costs more the more
    groups there are."""
    queue, parked = OnlyTags(), threading.Event()
    with opened(host, queue, Rules(max_versions=2, wait=False, metric=None, refill=False)) as rollout:
        rollout.add("train", 1, ["a"], 1)
        rollout.start("train", "a")
        rollout.session("train", "a", 0, [1.0])
        rollout.index.look = lambda partition: parked.set()  # type: ignore[method-assign]
        looks = queue.looks
        waiting = threading.Thread(target=rollout.index.wait, args=(1, "train", 1))
        waiting.start()
        parked.wait()
        rollout.end("train", "a", "finished")
        waiting.join()
        assert queue.looks == looks


def test_validation_is_neither_filtered_nor_dropped(host: ServiceHost) -> None:
    """A validation that waits for groups it has evicted never ends."""
    queue = FakeQueue()
    with opened(host, queue) as rollout:
        rollout.add("val", 1, ["flat", "failed"], 2)
        finish(rollout, "flat", 1.0, 1.0, partition="val")
        rollout.fail("val", "failed")
        rollout.end("val", "failed", "failure")
        assert rollout.index.depth(9, "val") == 2
        assert rollout.index.sample(9, "val", 2) == (["flat", "failed"], {})


def test_a_trainer_that_was_replaced_is_refused(host: ServiceHost) -> None:
    """Two trainers on one index would each sample half of the groups."""
    queue = FakeQueue()
    with opened(host, queue) as old, opened(host, queue), pytest.raises(StaleEpoch):
        old.index.wait(1, "train", 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"buffer": "h:1"}, "run_id"),
        ({"run_id": "r"}, "buffer"),
        ({"run_id": "r", "buffer": "h:1", "polcy": "jit"}, "polcy"),
        ({"run_id": "r", "buffer": "h:1", "poll_interval": 0}, "poll_interval"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    """A misspelt key would be a default that nobody asked for."""
    with pytest.raises(ValueError, match=named):
        VerlSetup.read(settings)


def test_two_different_filters_are_refused() -> None:
    """verl checks its own filter setting and does not give it to a custom sampler."""
    setup = VerlSetup("r", "h:1")
    setup.check_filter({"filter_groups": {"enable": False, "metric": "acc"}})
    with pytest.raises(ValueError, match="'acc'"):
        setup.check_filter({"filter_groups": {"enable": True, "metric": "acc"}})
