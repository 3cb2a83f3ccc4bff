"""verl's real trainer, with and without the adapter, against real services: no GPU, see `cpu.py` for what is stood in.

Prompts of slow steps are answered only once the next step has begun, so verl's policy lends at the end of each; all
others are answered before the decision, so it does not. No wait falls into a sample, so no measured time decides.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from turnout.client import EngineClient, SchedulerClient
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

GROUPS, N, HYBRIDS = 8, 2, 2
"""As in `cpu.py`, which only verl's environment can import."""

STEPS = 20
SLOW = frozenset({2, 3, 7, 10, 14, 15, 19, 20})
RUN = "verl-run"


@pytest.fixture(autouse=True)
def _cpu(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.verl.adapter import cpu

    cpu.install(monkeypatch)


@contextmanager
def services(balancer: str = "turnout-balancer") -> Iterator[dict[str, Any]]:
    """The three services; their addresses as `sampler_kwargs` name them."""
    import ray

    from services.buffer import service as buffer_service
    from services.buffer.settings import BufferSettings
    from services.engine import service as engine_service
    from services.engine.settings import EngineSettings
    from services.scheduler import service as scheduler_service
    from services.scheduler.settings import SchedulerSettings
    from tests.verl.adapter.hosts import LISTEN, in_thread

    place = f"{ray.get_runtime_context().namespace}/{balancer}"
    with in_thread(
        lambda: engine_service.build(EngineSettings(listen=LISTEN, verl_balancer=place)),
        lambda: buffer_service.build(BufferSettings(listen=LISTEN)),
        lambda: scheduler_service.build(SchedulerSettings(listen=LISTEN)),
    ) as (engine, buffer, scheduler):
        yield {
            "run_id": RUN,
            "buffer": buffer.target,
            "engine": engine.target,
            "scheduler": scheduler.target,
            "look_interval": 5.0,
        }


class Life:
    """One process of a trainer, from its start to the end of `fit`."""

    def __init__(self, trainer_cls: Any, loops: Any, config: Any, **told: Any) -> None:
        import ray

        from tests.verl.adapter import cpu

        gate = cpu.start_gate()
        kind = type(trainer_cls.__name__, (cpu.OnCpu, trainer_cls), {"gate": gate, "slow": SLOW, **told})
        self.trainer = kind(config=config)
        self.loops = None
        self.progress: list[engine_pb2.ProgressReport] = []
        try:
            self.trainer.init()
            self.loops = loops.create(
                config=self.trainer.config,
                llm_client=self.trainer.get_llm_client(),
                reward_loop_worker_handles=(),
            )
            with self._watched():
                self.trainer.fit(self.loops)
            replicas = [
                *self.trainer.llm_server_manager.rollout_replicas,
                *self.trainer.standalone_server_manager.rollout_replicas,
            ]
            self.logs = {replica.replica_rank: ray.get(replica.servers[0].log.remote()) for replica in replicas}
            balancer = self.trainer.standalone_server_manager.global_load_balancer
            self.servers = sorted(ray.get(balancer.get_all_servers.remote()))
        finally:
            self._end(gate)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Read the progress meanwhile, if there is a controller."""
        target = self.trainer.config.trainer.v1.sampler.sampler_kwargs.get("engine")
        ended = threading.Event()

        def read() -> None:
            with EngineClient(target) as client:
                while not ended.wait(0.02):
                    report = client.calls.GetProgress(engine_pb2.GetProgressRequest(run_id=RUN)).report
                    self.progress.append(report)

        reader = threading.Thread(target=read if target else ended.wait)
        reader.start()
        try:
            yield
        finally:
            ended.set()
            reader.join()

    def _end(self, gate: Any) -> None:
        """What ends with the job of a trainer."""
        import ray
        import transfer_queue

        actors = [gate, *(self.loops.agent_loop_workers if self.loops else ())]
        for manager in ("llm_server_manager", "standalone_server_manager"):
            servers = getattr(self.trainer, manager, None)
            if servers is not None:
                actors += [*servers.server_handles, servers.global_load_balancer]
        actors.append(getattr(self.trainer, "_balancer_name", None))
        for actor in filter(None, actors):
            ray.kill(actor)
        for partition, keys in (transfer_queue.kv_list() or {}).items():
            if keys:
                transfer_queue.kv_clear(keys=list(keys), partition_id=partition)


def of_verl(folder: Path, *, steps: int = STEPS, switch: bool = True) -> Life:
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from tests.verl.adapter import cpu
    from tests.verl.adapter.loops import VerlLoops

    return Life(PPOTrainerSeparateAsync, VerlLoops, cpu.configuration(folder, steps=steps, switch=switch))


def of_turnout(folder: Path, settings: dict[str, Any], *, steps: int = STEPS, switch: bool = True, **told: Any) -> Life:
    from tests.verl.adapter import cpu
    from tests.verl.adapter.loops import TurnoutLoops
    from turnout.integrations.verl import Trainer

    config = cpu.configuration(folder, steps=steps, switch=switch, sampler_kwargs=settings)
    config.trainer.v1.trainer_mode = "turnout"
    return Life(Trainer, TurnoutLoops, config, **told)


def decisions(life: Life) -> list[tuple[float, ...]]:
    """What was decided at each step's end, without measured times."""
    names = ("sampleable_count", "remaining", "should_switch_to_rollout")
    return [tuple(seen[f"separate_async/decision/{name}"] for name in names) for seen in life.trainer.seen]


def check_calls(ours: Life, theirs: Life) -> None:
    """The same calls in the same order at each replica.

    Except at the beginning: verl puts the hybrid ones to sleep with an open gate, here they are paused first, and so
    resumed when their first weights are there.
    """
    for rank, log in theirs.logs.items():
        mine = list(ours.logs[rank])
        if rank < HYBRIDS:
            assert mine[:5] == ["pause", "sleep 2", "wake weights", "wake kv_cache", "resume"]
            del mine[4], mine[0]
        assert mine == log, f"replica {rank}"


def test_the_scheduler_drives_replicas_as_verl_does(tmp_path: Path) -> None:
    """Twenty steps with validation, checkpoints and the last step: the same calls in the same order at each replica."""
    theirs = of_verl(tmp_path / "theirs")
    with services() as settings:
        ours = of_turnout(tmp_path / "ours", settings)
    assert ours.trainer.modes == theirs.trainer.modes
    assert decisions(ours) == decisions(theirs)
    assert {lent for _, _, lent in decisions(theirs)} == {0.0, 1.0}
    check_calls(ours, theirs)
    assert ours.servers == theirs.servers
    outputs = [seen["batch/outputs"] for seen in theirs.trainer.seen]
    assert [seen["batch/outputs"] for seen in ours.trainer.seen] == outputs
    # What verl logs, this logs too.
    assert ours.trainer.seen[3].keys() >= theirs.trainer.seen[3].keys()


def test_with_switching_off_nothing_changes(tmp_path: Path) -> None:
    theirs = of_verl(tmp_path / "theirs", steps=6, switch=False)
    with services() as settings:
        ours = of_turnout(tmp_path / "ours", settings, steps=6, switch=False)
    assert ours.trainer.modes == theirs.trainer.modes
    check_calls(ours, theirs)


def test_a_killed_trainer_goes_on_from_verls_checkpoint(tmp_path: Path) -> None:
    """The manifest lies in verl's folder before its marker; the index is made anew from what verl restored."""
    with services() as settings:
        with pytest.raises(RuntimeError, match="killed at step 7"):
            of_turnout(tmp_path, settings, killed_at=7)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
        manifest = json.loads((tmp_path / "global_step_5" / "turnout.json").read_text())
        assert (manifest["step"], manifest["buffer"]) == (5, False)
        second = of_turnout(tmp_path, settings | {"take_over": True}, steps=12)
        assert [mode.split()[0] for mode in second.trainer.modes] == [str(step) for step in range(6, 13)]
        assert second.trainer.actor_rollout_wg.loaded.endswith("global_step_5/actor")
        assert all(seen["batch/outputs"] == GROUPS * N for seen in second.trainer.seen)
        with SchedulerClient(settings["scheduler"]) as scheduler:
            run = scheduler.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN)).run
        assert (run.step, run.open) == (12, False)


@pytest.mark.parametrize("policy", ["jit", "shadow:jit"])
def test_other_policies_decide_from_progress_read_in_verls_servers(tmp_path: Path, policy: str) -> None:
    with services() as settings:
        life = of_turnout(tmp_path, settings | {"policy": policy}, steps=6)
    assert len(life.trainer.seen) == 6
    assert all(seen["batch/outputs"] == GROUPS * N for seen in life.trainer.seen)
    known = [report for report in life.progress if report.requests]
    assert known, "no request was ever seen in a server"
    assert all(request.HasField("join_key") for report in known for request in report.requests)
    assert max(report.covered_share for report in known) == 1.0
