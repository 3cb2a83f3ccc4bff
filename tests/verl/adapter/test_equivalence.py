"""The index beside verl's own `ReplayBufferAsync`, fed with the same events.

verl takes equally old groups in the order of a set; here it is given the order of arrival, so that the next events find
the same groups on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from services.runtime.host import ServiceHost
from tests.verl.adapter.hosts import buffer_host
from tests.verl.adapter.queue import FakeQueue
from tests.verl.adapter.rollout import RUN, Rollout, Unindexed
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient
from turnout.integrations.verl._index import Index, Rules

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default")]

SEQUENCES, EVENTS = 2000, 30


@pytest.fixture(scope="module")
def host() -> Iterator[ServiceHost]:
    with buffer_host() as host:
        yield host


@pytest.fixture(autouse=True)
def _verls_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bring back verl's queue afterwards: its trainer, tested next, would look into the last of ours for ever."""
    from verl.trainer.ppo.v1 import replay_buffer as module

    monkeypatch.setattr(module, "tq", module.tq)


def verls_buffer(rules: Rules, queue: FakeQueue, refill_fn: Callable[[int], Any]) -> Any:
    """verl's own buffer over a queue."""
    from verl.trainer.ppo.v1 import replay_buffer as module

    class ByArrival(module.ReplayBufferAsync):  # type: ignore[misc]
        def _sampleable_terminal_keys(self, partition_id: str, reasons: Any) -> Any:
            keys = super()._sampleable_terminal_keys(partition_id, reasons)
            return [uid for uid in self.prompt_global_steps[partition_id] if uid in keys]

    module.tq = queue
    return ByArrival(
        trainer_mode="separate_async",
        trainer_config={},
        max_off_policy_threshold=rules.max_versions,
        max_off_policy_strategy="wait" if rules.wait else "drop",
        sampler_kwargs={},
        refill_fn=refill_fn,
        filter_groups_metric=rules.metric,
    )


class Pair:
    """Both buffers, each over a queue of its own, and what happens to both."""

    def __init__(self, host: ServiceHost, rules: Rules) -> None:
        self.rules = rules
        self.theirs, self.ours = FakeQueue(), FakeQueue()
        self.index = Index(RUN, rules, self.ours, BufferClient(host.target), refill_fn=self._refill_ours)
        self.index.start()
        self.rollouts = (Unindexed(self.theirs), Rollout(self.index, host.target, self.ours))
        self.verl = verls_buffer(rules, self.theirs, self._refill_theirs)
        self.step = 1
        self.flying: list[tuple[str, str, int]] = []
        self._refilled = [0, 0]
        self._added = 0

    def close(self) -> None:
        self.rollouts[1].close()
        self.index.close()

    def _refill_theirs(self, count: int) -> None:
        self._refill(0, count)

    def _refill_ours(self, count: int) -> None:
        self._refill(1, count)

    def _refill(self, side: int, count: int) -> None:
        first = self._refilled[side]
        self._refilled[side] += count
        for number in range(first, first + count):
            self.rollouts[side].add("train", self.step, [f"r{number}"], 2)
            if side == 0:
                self.flying.append(("train", f"r{number}", 2))

    def add(self, partition: str, sessions: int) -> None:
        self._added += 1
        for rollout in self.rollouts:
            rollout.add(partition, self.step, [f"g{self._added}"], sessions)
        self.flying.append((partition, f"g{self._added}", sessions))

    def settle(self, rng: random.Random) -> None:
        """One group in flight comes to its end."""
        partition, uid, sessions = self.flying.pop(rng.randrange(len(self.flying)))
        failing = rng.random() < 0.15
        made = [[float(rng.randrange(2))] * rng.randint(1, 2) for _ in range(sessions)]
        for rollout in self.rollouts:
            rollout.start(partition, uid)
            for session, rewards in enumerate(made):
                if failing and not session:
                    rollout.fail(partition, uid)
                else:
                    rollout.session(partition, uid, session, rewards)
            rollout.end(partition, uid, "failure" if failing else "finished")

    def check_depth(self, partition: str, ahead: int = 0) -> int:
        depth: int = self.verl.get_sampleable_count(self.step + ahead, partition)
        assert self.index.depth(self.step + ahead, partition) == depth
        return depth

    def held(self) -> bool:
        """Whether verl would let nothing be sampled; the index has to say the same."""
        held = not self.verl._has_enough_samples(self.step, "train", 0, [])
        request = buffer_pb2.GetSampleableCountRequest(run_id=RUN, partition="train", step=self.step)
        assert self.index.buffer.calls.GetSampleableCount(request).depth.HasField("hold") == held
        return held

    def wait(self, target: int) -> None:
        _, theirs = self.verl.wait_for_sampleable(self.step, "train", target)
        self.check_evicted(theirs, self.index.wait(self.step, "train", target))

    def sample(self, partition: str, batch: int) -> None:
        theirs, evicted = self.verl.sample(self.step, partition, batch)
        uids, metrics = self.index.sample(self.step, partition, batch)
        keys, tags = self.index.materialize(partition, uids)
        assert (keys, tags) == (theirs.keys, theirs.tags)
        self.check_evicted(evicted, metrics)

    def check_evicted(self, theirs: dict[str, Any], ours: dict[str, float]) -> None:
        theirs.pop("_dapo_filtered_reward_counts", None)
        assert ours == pytest.approx(theirs)
        assert self._refilled[0] == self._refilled[1]
        assert self.theirs.tags == self.ours.tags


def play(pair: Pair, rng: random.Random) -> None:
    """Random events; waits and samples only for what is there, since verl's would poll for ever."""
    for _ in range(EVENTS):
        match rng.choices(["add", "settle", "step", "depth", "wait", "sample", "val"], [6, 8, 2, 2, 2, 3, 1])[0]:
            case "add":
                pair.add(rng.choice(["train", "train", "train", "val"]), rng.randint(1, 3))
            case "settle" if pair.flying:
                pair.settle(rng)
            case "step":
                pair.step += 1
            case "depth":
                pair.check_depth("train", rng.randint(0, 1))
                pair.check_depth("val")
            case "wait":
                depth = pair.check_depth("train")
                if not pair.held():
                    pair.wait(rng.randint(0, depth))
            case "sample":
                depth = pair.check_depth("train")
                if depth and not pair.held():
                    pair.sample("train", rng.randint(1, depth))
            case "val":
                depth = pair.check_depth("val")
                if depth and not (pair.rules.wait and pair.rules.max_versions):
                    pair.sample("val", rng.randint(1, depth))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_depth_and_samples_equal_verls_over_random_events(host: ServiceHost, part: int) -> None:
    """An index that drifts from verl's own numbers lends and reclaims at other moments than verl would."""
    for seed in range(part, SEQUENCES, 4):
        rng = random.Random(seed)
        wait = rng.random() < 0.3
        rules = Rules(
            # With a threshold of 1 verl's wait is held by what it refills itself, for ever.
            max_versions=rng.choice([None, 2, 3] if wait else [None, 1, 2, 3]),
            wait=wait,
            metric=rng.choice([None, "reward"]),
            refill=True,
        )
        with closing(Pair(host, rules)) as pair:
            try:
                play(pair, rng)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {rules}") from error


@pytest.mark.smoke
def test_a_few_random_events_agree_with_verl(host: ServiceHost) -> None:
    """The same, short enough for every run of the tests."""
    for seed in range(20):
        with closing(Pair(host, Rules(2, wait=False, metric="reward", refill=True))) as pair:
            play(pair, random.Random(seed))


def one_group(pair: Pair, uid: str, *rewards: float) -> None:
    for rollout in pair.rollouts:
        rollout.add("train", 1, [uid], max(1, len(rewards)))
        for session, reward in enumerate(rewards):
            rollout.session("train", uid, session, [reward])
        if not rewards:
            rollout.session("train", uid, 0, [])
        rollout.end("train", uid, "finished")


def test_verl_is_wrong_about_equal_rewards_that_were_rounded(host: ServiceHost) -> None:
    """0.1 + 0.2 and 0.3 are one reward; verl asks for a deviation of exactly 0 and trains on nothing."""
    with closing(Pair(host, Rules(None, wait=False, metric="reward", refill=True))) as pair:
        one_group(pair, "g", 0.1 + 0.2, 0.3)
        assert pair.verl.get_sampleable_count(1, "train") == 1
        assert pair.index.depth(1, "train") == 0


def test_verl_is_wrong_about_uids_with_an_underscore(host: ServiceHost) -> None:
    """It splits keys at the first one, and hands out a group without its outputs."""
    with closing(Pair(host, Rules(None, wait=False, metric=None, refill=True))) as pair:
        one_group(pair, "data_set-1", 1.0, 0.0)
        batch, _ = pair.verl.sample(1, "train", 1)
        uids, _ = pair.index.sample(1, "train", 1)
        assert batch.keys == []
        assert pair.index.materialize("train", uids)[0] == ["data_set-1_0_0", "data_set-1_1_0"]


def test_verl_is_wrong_about_finished_groups_without_any_output(host: ServiceHost) -> None:
    """It counts and samples them, so that a mini-batch has less than it says; here they fail and are replaced."""
    with closing(Pair(host, Rules(None, wait=False, metric=None, refill=True))) as pair:
        one_group(pair, "g")
        assert pair.verl.get_sampleable_count(1, "train") == 1
        assert pair.index.depth(1, "train") == 0


def test_verl_is_wrong_about_groups_whose_metric_nobody_computed(host: ServiceHost) -> None:
    """It raises in the trainer and ends the job; here the group fails and is replaced, and the worker logs why."""
    with closing(Pair(host, Rules(None, wait=False, metric="acc", refill=True))) as pair:
        one_group(pair, "g", 1.0, 0.0)
        for key in ("g_0_0", "g_1_0"):
            pair.theirs.fields["train", key] = {"extra_fields": {"reward_extra_info": {}}}
        with pytest.raises(Exception, match="acc"):
            pair.verl.get_sampleable_count(1, "train")
        assert pair.index.depth(1, "train") == 0
        pair.index.wait(1, "train", 0)
        assert pair._refilled == [0, 1]
