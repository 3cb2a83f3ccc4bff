"""A `jit` policy with a thousand requests in flight: how long a decision takes, and what following them costs.

Invariants: times are processor time of this process, so a busy machine does not show in them; every decision comes
after a reading that changed, as in a run, and so rests on no memo of the one before; the baseline of a decision is
`verl`'s at the same point, that of a reading its message alone, read from its bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from services.bench.result import Result
from services.scheduler.convert_events import event_to_proto
from services.scheduler.domain import events, group_events
from services.scheduler.domain.config import RunConfig
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.run import Depth, Moment, Run
from services.scheduler.packing import PACKING
from services.scheduler.policies import create
from services.scheduler.policies.config import SwitchConfig
from services.scheduler.policies.types import Point
from services.scheduler.readings import counters_of, requests_of
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from turnout.engine.v1 import engine_pb2

GROUP = 8
BATCH = 64
HYBRIDS, STANDALONES = 4, 2
READING_EVERY_S = 10.0
"""As the scheduler asks for them by default."""


class Scene:
    """A run with `requests` in flight, half of them past their first thousand tokens."""

    def __init__(self, policy: str, requests: int) -> None:
        config = RunConfig(
            switch=SwitchConfig(enable_switch=True),
            policy=policy,
            train_batch_size=BATCH,
            parameter_sync_step=4,
            mini_batch_size=BATCH // 4,
            total_training_steps=1_000_000,
            hybrid_gpus=HYBRIDS,
            standalone_gpus=STANDALONES,
            group_size=GROUP,
            max_response_tokens=32_768,
        )
        self.now = 0.0
        self.turns = Turns()
        self.run = Run("bench", config, create, EventLog(100_000, PACKING), 1.0, self.moment)
        self.run.open(1, config, None, self.moment)
        self._random = random.Random(0)
        self._requests = requests
        self._decoded = 0
        self.step = 0
        self._learn()

    @property
    def moment(self) -> Moment:
        """Now."""
        return Moment(self.now, self.now)

    def tell(self, event: events.Happening, later: float = 0.0) -> None:
        """Something happens, so many seconds later."""
        self.now += later
        self.run.record(event, self.moment)

    def _learn(self) -> None:
        """What a policy knows after some steps: lengths, speeds, costs and the rhythm of training."""
        self.tell(events.TopologyChanged(HYBRIDS, STANDALONES, HYBRIDS, STANDALONES))
        for number in range(3 * BATCH):
            lengths = tuple(int(self._random.lognormvariate(9.0, 0.75)) for _ in range(GROUP))
            self.tell(group_events.GroupFinished(f"past-{number}", lengths, 0, False), 0.1)
        groups = tuple(f"g{number}" for number in range(self._requests // GROUP))
        self.tell(group_events.GroupsAdded(groups, 0, (GROUP,) * len(groups)))
        for _ in range(6):
            self.tell(requests_of(self.reading(), "train", self.turns, Reports()), READING_EVERY_S)
            self.tell(counters_of(self.reading(), {}))
        self.tell(events.LendDone("l", events.LendKind.STEP_END, 15.0, True))
        self.tell(events.ReclaimDone(5.0, True))
        self.end_step()

    def end_step(self) -> None:
        """One more step, all of it."""
        self.step += 1
        self.tell(events.StepBegan(self.step), 20.0)
        for mini_batch in range(4):
            self.tell(events.MiniBatchBegan(self.step, mini_batch, 16))
            self.tell(events.MiniBatchEnded(self.step, mini_batch, 1.0), 1.0)
            self.now += 10.0
        self.tell(events.StepEnded(self.step))
        self._depth(self.step + 1)

    def begin_lent_step(self) -> None:
        """A step begins with the GPUs lent."""
        self.step += 1
        self.tell(events.LendDone(f"l{self.step}", events.LendKind.STEP_END, 15.0, True))
        self.tell(events.StepBegan(self.step))
        self._depth(self.step)

    def _depth(self, step: int) -> None:
        self.run.observe_depth(Depth(step, BATCH // 4, self._requests // GROUP, 0), self.moment)

    def reading(self) -> engine_pb2.ProgressReport:
        """Everything that runs, some tokens further than last time."""
        self._decoded += 500
        report = engine_pb2.ProgressReport(covered_share=1.0)
        replicas = HYBRIDS + STANDALONES
        for number in range(self._requests):
            group, trajectory = divmod(number, GROUP)
            hybrid = number % replicas < HYBRIDS
            report.requests.add(
                join_key=engine_pb2.JoinKey(partition="train", group_id=f"g{group}", trajectory=trajectory),
                engine_request_id=f"12345678-r{number}",
                replica_id=f"r{number % replicas}",
                role=engine_pb2.REPLICA_ROLE_HYBRID if hybrid else engine_pb2.REPLICA_ROLE_STANDALONE,
                prompt_tokens=700,
                output_tokens=self._random.randrange(2000) + self._decoded // 10,
            )
        for number in range(replicas):
            report.replicas.add(
                replica_id=f"r{number}",
                role=engine_pb2.REPLICA_ROLE_HYBRID if number < HYBRIDS else engine_pb2.REPLICA_ROLE_STANDALONE,
                decoded_tokens=self._decoded * self._requests // replicas,
                prefilled_tokens=self._decoded,
                prefill_seconds=self._decoded / 50_000,
                running=self._requests // replicas,
            )
        return report


def decisions(requests: int, rounds: int) -> list[Result]:
    """A decision at a step's end, and one while the trainer waits with its GPUs lent."""
    results = []
    for name, point, prepare in (
        ("decision_step_end", Point.STEP_END, Scene.end_step),
        ("decision_waiting", Point.WAITING, Scene.begin_lent_step),
    ):
        ours, verl = (_decide(Scene(policy, requests), point, prepare, rounds) for policy in ("jit", "verl"))
        results.append(Result(f"{name}_{requests}", "ms", 1000 * ours, 1000 * verl))
    return results


def _decide(scene: Scene, point: Point, prepare: Callable[[Scene], None], rounds: int) -> float:
    """Median seconds."""
    prepare(scene)
    taken = []
    for _ in range(rounds):
        scene.tell(requests_of(scene.reading(), "train", scene.turns, Reports()))
        begin = time.process_time()
        scene.run.decide(point, scene.step, scene.moment)
        taken.append(time.process_time() - begin)
    return median(taken)


def following(requests: int, rounds: int) -> Result:
    """What following the requests costs, in per cent of a core: a reading every 10 s, from its bytes to the policy,
    to the log and to the bytes of the journal."""
    scene = Scene("jit", requests)
    ours, bare = [], []
    for _ in range(rounds):
        message = scene.reading().SerializeToString()
        begin = time.process_time()
        engine_pb2.ProgressReport.FromString(message)
        bare.append(time.process_time() - begin)
        begin = time.process_time()
        report = engine_pb2.ProgressReport.FromString(message)
        first = scene.run.log.last + 1
        scene.tell(requests_of(report, "train", scene.turns, Reports()))
        scene.tell(counters_of(report, {}))
        for placed in scene.run.log.read(first, 100):
            event_to_proto(placed).SerializeToString()
        ours.append(time.process_time() - begin)
    share = 100 / READING_EVERY_S
    return Result(f"following_{requests}", "% of one core", share * median(ours), share * median(bare))
