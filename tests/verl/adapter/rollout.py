"""Prompts and agent loops as verl's have them: what they put into TransferQueue, and what they report to the index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.verl.adapter.queue import FakeQueue, Score
from turnout.client import AsyncBufferClient
from turnout.integrations.verl import _queue
from turnout.integrations.verl._index import Index
from turnout.integrations.verl._reports import GroupReport

RUN = "verl-run"


def tag(step: int, length: int = 5) -> dict[str, Any]:
    """What verl's worker tags an output with."""
    return {
        "status": "success",
        "prompt_len": 3,
        "response_len": length,
        "seq_len": 3 + length,
        "global_steps": step,
        "min_global_steps": step,
        "max_global_steps": step,
    }


class Rollout:
    """The part of verl that makes groups; every event goes to all queues, and to the index."""

    def __init__(self, index: Index, target: str, *queues: FakeQueue) -> None:
        self.index = index
        self.queues = queues
        self.loop = asyncio.new_event_loop()
        self.client = AsyncBufferClient(target)
        self.reports: dict[tuple[str, str], GroupReport] = {}
        self.born: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.close()

    def add(self, partition: str, step: int, uids: Sequence[str], sessions: int) -> None:
        for uid in uids:
            self.put(uid, partition, {"is_prompt": True, "status": "pending", "global_steps": step})
        for uid, token in self.index.add(partition, step, [(uid, sessions) for uid in uids]).items():
            place = {"run_id": RUN, "partition": partition}
            self.reports[partition, uid] = GroupReport(self.client, place, token, uid, sessions)
            self.born[partition, uid] = step

    def start(self, partition: str, uid: str) -> None:
        self.put(uid, partition, {"status": "running"})

    def session(self, partition: str, uid: str, session: int, rewards: Sequence[float]) -> None:
        """A session ends with one output per reward, perhaps with none."""
        step, outputs = self.born[partition, uid], []
        for number, reward in enumerate(rewards):
            self.put(f"{uid}_{session}_{number}", partition, tag(step), {"rm_scores": Score(reward)})
            metric = {"reward": reward} if partition == _queue.TRAIN else {}
            outputs.append(_queue.output(tag(step), metric))
        self.loop.run_until_complete(self.reports[partition, uid].finished(session, outputs))

    def fail(self, partition: str, uid: str) -> None:
        """A session fails."""
        self.reports[partition, uid].failed(RuntimeError("the tool is gone"))

    def end(self, partition: str, uid: str, status: str, *, told: bool = True) -> None:
        """All sessions have settled. `told`: whether its report reaches the index."""
        self.put(uid, partition, {"status": status})
        report = self.reports.pop((partition, uid))
        if told:
            self.loop.run_until_complete(report.close())

    def put(self, key: str, partition: str, values: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
        for queue in self.queues:
            queue.put(key, partition, values, fields)


class Unindexed(Rollout):
    """The same without an index: verl as it is."""

    def __init__(self, *queues: FakeQueue) -> None:
        self.queues = queues
        self.born: dict[tuple[str, str], int] = {}

    def add(self, partition: str, step: int, uids: Sequence[str], sessions: int) -> None:
        for uid in uids:
            self.put(uid, partition, {"is_prompt": True, "status": "pending", "global_steps": step})
            self.born[partition, uid] = step

    def session(self, partition: str, uid: str, session: int, rewards: Sequence[float]) -> None:
        step = self.born[partition, uid]
        for number, reward in enumerate(rewards):
            self.put(f"{uid}_{session}_{number}", partition, tag(step), {"rm_scores": Score(reward)})

    def fail(self, partition: str, uid: str) -> None:
        pass

    def end(self, partition: str, uid: str, status: str, *, told: bool = True) -> None:
        self.put(uid, partition, {"status": status})
