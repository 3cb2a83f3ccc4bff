"""Collects the events of the job: those of the demo, and what memory each replica holds.

    memory   replica_id, bytes (resident set of its worker), storages (bytes behind its weights and KV blocks), state
             ("awake", "asleep", "between"): from now on

Invariant: a reading is recorded when it changes, with what the replica was at that moment.
"""

from __future__ import annotations

from services.demo.recorder import OnEvent, Recorder
from services.learner.job import REPLICAS, Job
from turnout.engine.v1 import engine_pb2


class MemoryRecorder(Recorder):
    """The demo's recorder with memory."""

    def __init__(self, job: Job, on_event: OnEvent) -> None:
        super().__init__(job.run_id, 1.0, REPLICAS, on_event)
        self._memory: dict[str, tuple[int, int, str]] = {}

    def take_replica(self, replica: engine_pb2.Replica) -> None:
        """Take in the present state of a replica."""
        super().take_replica(replica)
        if not replica.HasField("memory_bytes"):
            return
        held, storages, state = replica.memory_bytes, sum(replica.tag_bytes.values()), memory_state(replica)
        replica_id = replica.spec.replica_id
        if self._memory.get(replica_id) != (held, storages, state):
            self._memory[replica_id] = held, storages, state
            self.record_now("memory", {"replica_id": replica_id, "bytes": held, "storages": storages, "state": state})


def memory_state(replica: engine_pb2.Replica) -> str:
    """Return whether a replica has all of its memory, or none, or is on its way from one to the other."""
    if replica.confirmed_free:
        return "asleep"
    awake = set(replica.declared_tags) <= set(replica.resident_tags) and not replica.paused and not replica.update_id
    return "awake" if awake else "between"
