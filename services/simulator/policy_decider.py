"""Puts a real policy into a simulated run: feeds it the events a scheduler would, and asks it.

Invariants: the policy sees what a run's scheduler shows it, nothing of the future; a reading of running requests is
left out where no decision comes before the next one, since each replaces the one before; what finished between two
readings is in the next.
"""

from __future__ import annotations

from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import (
    Decision,
    Event,
    Point,
    Pool,
    ReplicaCounters,
    RequestKey,
    RequestProgress,
    RequestState,
)
from services.simulator.replica import Replica
from services.simulator.run import SimulatedRun

# Never read engines more often than this, whatever asks: the shortest interval of the controller's messages.
_FRESH_S = 2.0


class PolicyDecider:
    """`coverage`: the share of running requests that readings cover, the first ones of every replica."""

    def __init__(self, policy: Policy, run_progress_s: float, coverage: float = 1.0) -> None:
        self.policy = policy
        self._reads = getattr(policy, "reads_progress", False)
        self._progress_s = run_progress_s
        self._coverage = coverage
        self._read_at = -1.0
        self._keys: dict[int, RequestKey] = {}

    @property
    def ticks_s(self) -> float | None:
        return self._progress_s if self._reads else None

    def tell(self, event: Event) -> None:
        self.policy.observe(event)

    def tick(self, run: SimulatedRun) -> None:
        self._observe_counters(run)
        if run.lent:
            self._observe_requests(run)

    def decide(self, point: Point, run: SimulatedRun) -> Decision:
        asks = point is not Point.SAMPLE_BEGIN or run.workload.reinstall_within_step
        if self._reads and asks and run.now - self._read_at >= min(_FRESH_S, self._progress_s):
            run.fleet.advance(run.now)
            if point is not Point.WAITING or run.now - self._read_at >= self._progress_s:
                self._observe_requests(run)
        return self.policy.decide(point, run.now)

    def _observe_counters(self, run: SimulatedRun) -> None:
        for replica in run.fleet.all:
            if replica.serving:
                self.tell(
                    ReplicaCounters(
                        at=run.now,
                        replica=replica.name,
                        pool=Pool.HYBRID if replica.hybrid else Pool.STANDALONE,
                        decoded_tokens=int(replica.decoded),
                        running_requests=len(replica.ends),
                        prefill_tokens_per_s=replica.prefilled / replica.prefill_s if replica.prefill_s > 0 else None,
                    )
                )

    def _observe_requests(self, run: SimulatedRun) -> None:
        self._read_at = run.now
        states: list[RequestState] = []
        for replica in run.fleet.all:
            states += self._running(run, replica)
        running = len(states)
        states = states[: round(running * self._coverage)]
        for request in run.finished_requests:
            states.append(
                RequestState(
                    key=self._key_of(run, request),
                    tokens=run.lengths[request],
                    replica="",
                    pool=Pool.STANDALONE,
                    finished=True,
                )
            )
        run.finished_requests.clear()
        self.tell(RequestProgress(at=run.now, requests=tuple(states), covered_share=self._coverage))

    def _running(self, run: SimulatedRun, replica: Replica) -> list[RequestState]:
        pool = Pool.HYBRID if replica.hybrid else Pool.STANDALONE
        name, lengths, keys, progress = replica.name, run.lengths, self._keys, replica.progress
        states = []
        for end, request in replica.ends:
            key = keys.get(request)
            if key is None:
                key = self._key_of(run, request)
            tokens = int(lengths[request] + progress - end)
            states.append(RequestState(key=key, tokens=tokens if tokens > 0 else 0, replica=name, pool=pool))
        return states

    def _key_of(self, run: SimulatedRun, request: int) -> RequestKey:
        key = self._keys.get(request)
        if key is None:
            group, trajectory = divmod(request, run.workload.batch.group_size)
            key = self._keys[request] = RequestKey(f"g{group}", trajectory)
        return key
