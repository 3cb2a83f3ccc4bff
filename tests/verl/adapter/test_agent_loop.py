"""The adapter's agent loop worker: verl's own code around a client and a TransferQueue without processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.host import ServiceHost
from tests.verl.adapter.hosts import buffer_host
from tests.verl.adapter.queue import FakeQueue
from tests.verl.adapter.rollout import RUN
from turnout.client import BufferClient
from turnout.integrations.verl._index import Index, Rules

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default")]


class Queue(FakeQueue):
    """What verl's worker calls of it."""

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.put(key, partition_id, tag)

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        for key, tag in zip(keys, tags, strict=True):
            self.put(key, partition_id, tag)


class Client:
    """Answers with as many tokens as it was told, and fails where it was told."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.ids: list[str] = []

    async def generate(self, request_id: str, **_: Any) -> Any:
        from turnout.integrations.verl._requests import REQUEST, fresh_id

        key = REQUEST.get()
        assert key is not None
        self.ids.append(fresh_id(key, 0))
        if request_id in self.fails:
            raise RuntimeError("the server is gone")
        return SimpleNamespace(token_ids=[7, 7], extra_fields={"min_global_steps": 3, "max_global_steps": 3})


@pytest.fixture
def host() -> Iterator[ServiceHost]:
    with buffer_host() as host:
        yield host


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    import verl.trainer.ppo.v1.agent_loop_tq as module

    queue = Queue()
    monkeypatch.setattr(module, "tq", queue)
    return queue


def worker_of(host: ServiceHost, client: Client) -> Any:
    from omegaconf import OmegaConf

    from tests.verl.adapter.loops import TurnoutWorker

    class Worker(TurnoutWorker):
        def __init__(self) -> None:
            self.prepare(config, client)

    settings = {"run_id": RUN, "buffer": host.target, "filter_groups_metric": "reward"}
    rollout = {"n": 2, "val_kwargs": {"n": 1}}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout},
            "algorithm": {"filter_groups": {"enable": True, "metric": "reward"}},
            "trainer": {"v1": {"sampler": {"sampler_kwargs": settings}}},
            "data": {},
        }
    )
    return Worker()


def prompt(index: Index, uid: str, partition: str = "train", sessions: int = 2) -> dict[str, Any]:
    token = index.add(partition, 3, [(uid, sessions)])[uid]
    return {
        "uid": uid,
        "agent_name": "paced",
        "raw_prompt": "?",
        "global_steps": 3,
        "turnout_claim": f"{token.claim_id}/{token.attempt}",
    }


async def test_groups_are_reported_as_verl_ends_them(
    host: ServiceHost, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own code writes to TransferQueue; what the index hears has to be the same."""
    from tests.verl.adapter import loops

    async def at_once(self: Any, *_: Any) -> None: ...

    monkeypatch.setattr(loops.Paced, "_wait", at_once)
    client = Client()
    worker = worker_of(host, client)
    index = Index(RUN, Rules(2, wait=False, metric="reward", refill=True), queue, BufferClient(host.target))
    index.start()
    try:
        client.fails.add("broken-1")
        for uid in ("good", "broken"):
            queue.put(uid, "train", {"is_prompt": True, "status": "pending", "global_steps": 3})
            await worker._run_prompt(
                prompt(index, uid), {}, trajectory={"validate": False, "step": 3, "sample_index": 0, "rollout_n": 0}
            )
        await worker._run_prompt(
            prompt(index, "val_one", "val", 1),
            {},
            trajectory={"validate": True, "step": 3, "sample_index": 0, "rollout_n": 0},
        )
        assert queue.tags["train"]["good"]["status"] == "finished"
        assert queue.tags["train"]["broken"]["status"] == "failure"
        assert index.depth(3, "train") == 1
        assert index.depth(3, "val") == 1
        states = {group.group_id: group for group in index._groups("train")}
        assert [output.rewards["reward"] for each in states["good"].trajectories for output in each.outputs] == [0, 1]
        assert [each.outputs[0].segments[0].tokens for each in states["good"].trajectories] == [2, 2]
        assert any('"val_one",0' in each for each in client.ids)
    finally:
        await worker._buffer.close()
        index.close()
