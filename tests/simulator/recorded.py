"""A simulated run as the events that a scheduler would have told of it."""

from __future__ import annotations

import json

from services.scheduler.policies import create
from services.scheduler.policies.types import (
    Decision,
    Event,
    GroupFinished,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    Point,
    Pool,
    ReclaimDone,
    ReplicaCounters,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SyncDone,
)
from services.simulator import Workload
from services.simulator.draws import draw
from services.simulator.policy_decider import PolicyDecider
from services.simulator.run import SimulatedRun
from turnout.scheduler.v1 import events_pb2


class Recorded(PolicyDecider):
    """Decides as the policy does, and writes down what it was told."""

    def __init__(self, workload: Workload, policy: str, config: dict[str, object]) -> None:
        super().__init__(create(policy, workload.policy_config()), workload.progress_s)
        self.events: list[events_pb2.RunEvent] = []
        self._counters: dict[str, events_pb2.ReplicaReading] = {}
        self._waited = 0.0
        self.add(0.0, run_opened=events_pb2.RunOpened(epoch=1, config_json=json.dumps(config)))

    @property
    def ticks_s(self) -> float | None:
        return 10.0

    def add(self, at: float, **event: object) -> None:
        self.events.append(events_pb2.RunEvent(sequence=len(self.events) + 1, at=at, **event))  # type: ignore[arg-type]

    def tick(self, run: SimulatedRun) -> None:
        self._counters = {}
        super().tick(run)
        for replica in run.fleet.all:
            if (reading := self._counters.get(replica.name)) is not None:
                reading.prefilled_tokens, reading.prefill_seconds = round(replica.prefilled), replica.prefill_s
        self.add(run.now, replica_counters=events_pb2.ReplicaCounters(replicas=self._counters.values()))

    def decide(self, point: Point, run: SimulatedRun) -> Decision:
        return super().decide(point, run)

    def tell(self, event: Event) -> None:
        super().tell(event)
        match event:
            case GroupFinished():
                finished = events_pb2.GroupFinished(group_id=event.group, lengths=event.lengths)
                self.add(event.at, group_finished=finished)
            case StepBegan():
                self.add(event.at, step_began=events_pb2.StepBegan(step=event.step))
            case StarvationEnded():
                self._waited = event.wait_s
            case MiniBatchBegan():
                # To a policy a mini-batch begins when the trainer has it; to a reader of events its wait ends then.
                ended = events_pb2.MiniBatchEnded(
                    step=event.step, mini_batch=event.mini_batch, wait_seconds=self._waited
                )
                self._waited = 0.0
                self.add(event.at, mini_batch_ended=ended)
            case MiniBatchEnded():
                began = events_pb2.MiniBatchBegan(step=event.step, mini_batch=event.mini_batch + 1)
                self.add(event.at, mini_batch_began=began)
            case StepEnded():
                self.add(event.at, step_ended=events_pb2.StepEnded(step=event.step))
            case LendDone():
                self.add(event.at, lend_done=events_pb2.LendDone(cost_seconds=event.cost_s, kind="LEND_KIND_STEP_END"))  # type: ignore[arg-type]
            case ReclaimDone():
                self.add(event.at, reclaim_done=events_pb2.ReclaimDone(cost_seconds=event.cost_s))
            case SyncDone():
                self.add(event.at, sync_done=events_pb2.SyncDone(seconds=event.cost_s))
            case ReplicaCounters():
                self._counters[event.replica] = events_pb2.ReplicaReading(
                    replica_id=event.replica,
                    hybrid=event.pool is Pool.HYBRID,
                    decoded_tokens=event.decoded_tokens,
                    running=event.running_requests,
                )
            case _:
                return


def recorded_run(workload: Workload, policy: str, seed: int) -> list[events_pb2.RunEvent]:
    """The events of a run of `workload`."""
    topology, batch = workload.topology, workload.batch
    config = {
        "policy": policy,
        "switch": {"enable_switch": policy != "off"},
        "train_batch_size": batch.groups,
        "mini_batch_size": batch.mini_batch,
        "num_warmup_batches": batch.warmup_batches,
        "total_training_steps": workload.steps,
        "hybrid_gpus": topology.hybrid_replicas * topology.gpus_per_replica,
        "standalone_gpus": topology.standalone_replicas * topology.gpus_per_replica,
        "max_response_tokens": workload.lengths.cap,
        "can_reinstall": False,
    }
    decider = Recorded(workload, policy, config)
    run = SimulatedRun(workload, draw(workload, seed), decider)
    run.begin()
    while not run.done:
        run.step()
    return decider.events
