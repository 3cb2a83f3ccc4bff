"""verl's real trainer, with and without the adapter, against real services: no GPU, see `cpu.py` for what is stood in.

Prompts of slow steps are answered only once the next step has begun, so verl's policy lends at the end of each; all
others are answered before the decision, so it does not. No wait falls into a sample, so no measured time decides.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.verl.adapter.hosts import buffer_host
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, EngineClient, SchedulerClient
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
def _cpu(queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.verl.adapter import cpu

    cpu.install(monkeypatch)
    # verl leaves a lock there for every folder that it makes.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


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
        import transfer_queue

        from tests.verl.adapter import cpu

        gate = cpu.start_gate()
        members: dict[str, Any] = {"gate": gate, "slow": SLOW, **told}
        if hasattr(trainer_cls, "_close"):

            def close(trainer: Any, reason: str | None) -> None:
                self._read()
                trainer_cls._close(trainer, reason)

            members["_close"] = close
        kind = type(trainer_cls.__name__, (cpu.OnCpu, trainer_cls), members)
        self.trainer = kind(config=config)
        self.loops = None
        self.progress: list[engine_pb2.ProgressReport] = []
        self.logs: dict[int, list[str]] = {}
        """What was done to each replica, before the run is closed."""
        self.servers: list[str] = []
        """Where the balancer sends requests, before the run is closed."""
        self.counted = self.made = 0
        """Tokens in the counters of the controller, and those of all the groups that the buffer had."""
        try:
            self.trainer.init()
            self.loops = loops.create(
                config=self.trainer.config,
                llm_client=self.trainer.get_llm_client(),
                reward_loop_worker_handles=(),
            )
            with self._watched():
                self.trainer.fit(self.loops)
            self._count()
            self.left = transfer_queue.kv_list("train").get("train", {})
            self.closed = self._logs()
            if not self.logs:
                self._read()
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

    def _logs(self) -> dict[int, list[str]]:
        import ray

        managers = self.trainer.llm_server_manager, self.trainer.standalone_server_manager
        replicas = [replica for manager in managers for replica in manager.rollout_replicas]
        return {replica.replica_rank: ray.get(replica.servers[0].log.remote()) for replica in replicas}

    def _read(self) -> None:
        import ray

        self.logs = self._logs()
        balancer = self.trainer.standalone_server_manager.global_load_balancer
        self.servers = sorted(ray.get(balancer.get_all_servers.remote()))

    def _count(self) -> None:
        """Read the counters until they have what was made, if there is a controller."""
        from tests.verl.adapter.cpu import TOKENS

        settings = self.trainer.config.trainer.v1.sampler.sampler_kwargs
        if not settings.get("engine"):
            return
        with BufferClient(settings["buffer"]) as buffer:
            for partition, sessions in (("train", N), ("val", 1)):
                ledger = buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition=partition))
                self.made += TOKENS * sessions * ledger.added
        with EngineClient(settings["engine"]) as engine:
            # What has ended is told without waiting for it.
            for _ in range(100):
                report = engine.calls.GetProgress(engine_pb2.GetProgressRequest(run_id=RUN)).report
                self.counted = sum(replica.decoded_tokens for replica in report.replicas)
                if self.counted >= self.made:
                    break
                threading.Event().wait(0.05)

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


def of_verl(folder: Path, *, steps: int = STEPS, switch: bool = True, **told: Any) -> Life:
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from tests.verl.adapter import cpu
    from tests.verl.adapter.loops import VerlLoops

    return Life(PPOTrainerSeparateAsync, VerlLoops, cpu.configuration(folder, steps=steps, switch=switch), **told)


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
        # The last validation leaves the GPUs lent, and closing the run takes them back.
        lent = rank < HYBRIDS and log[-1] != "sleep 2"
        assert ours.closed[rank] == ours.logs[rank] + (["pause", "sleep 2"] if lent else [])


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
    """Twenty steps in two lives: the manifest lies in verl's folder before its marker, the index is made anew from what
    verl restored, and the second life makes the calls that verl's makes."""
    with pytest.raises(RuntimeError, match="killed at step 7"):
        of_verl(tmp_path / "theirs", killed_at=7)
    theirs = of_verl(tmp_path / "theirs")
    folder = tmp_path / "ours"
    with services() as settings:
        with pytest.raises(RuntimeError, match="killed at step 7"):
            of_turnout(folder, settings, killed_at=7)
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "5"
        manifest = json.loads((folder / "global_step_5" / "turnout.json").read_text())
        # TransferQueue's checkpoint is verl's, and there is no second one.
        assert (manifest["step"], manifest["buffer"]) == (5, False)
        ours = of_turnout(folder, settings | {"take_over": True})
        with SchedulerClient(settings["scheduler"]) as scheduler:
            run = scheduler.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN)).run
    assert (run.step, run.open) == (STEPS, False)
    assert ours.trainer.actor_rollout_wg.loaded.endswith("global_step_5/actor")
    assert ours.trainer.modes == theirs.trainer.modes
    assert [mode.split()[0] for mode in ours.trainer.modes] == [str(step) for step in range(6, STEPS + 1)]
    assert decisions(ours) == decisions(theirs)
    check_calls(ours, theirs)
    assert all(seen["batch/outputs"] == GROUPS * N for seen in ours.trainer.seen)
    saved = [(save.folder, save.manifest, save.marker) for save in ours.trainer.actor_rollout_wg.saved]
    assert saved == [(f"global_step_{step}", True, str(step - 5)) for step in (10, 15, 20)]


def test_the_replay_buffer_alone_leaves_everything_else_to_verl(tmp_path: Path) -> None:
    """For who wants no more than waits that end at once: verl's own trainer and balancer, its calls and decisions."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from tests.verl.adapter import cpu
    from tests.verl.adapter.loops import TurnoutLoops
    from turnout.integrations.verl import ReplayBuffer

    theirs = of_verl(tmp_path / "theirs", steps=5)
    with buffer_host() as buffer:
        settings = {"run_id": RUN, "buffer": buffer.target}
        config = cpu.configuration(tmp_path / "ours", steps=5, switch=True, sampler_kwargs=settings)
        sampler = {"path": "pkg://turnout.integrations.verl", "name": "ReplayBuffer"}
        OmegaConf.update(config, "trainer.v1.sampler.custom_sampler", sampler, force_add=True)
        ours = Life(PPOTrainerSeparateAsync, TurnoutLoops, config)
        assert isinstance(ours.trainer.replay_buffer, ReplayBuffer)
        ours.trainer.replay_buffer.index.close()
    assert ours.trainer.modes == theirs.trainer.modes
    assert decisions(ours) == decisions(theirs)
    assert ours.logs == theirs.logs
    assert [seen["batch/outputs"] for seen in ours.trainer.seen] == [GROUPS * N] * 5


def test_groups_that_fail_are_replaced_by_verl_on_the_trainers_thread(tmp_path: Path) -> None:
    """Two fail before a sample, two while the GPUs are lent. verl's data loader and its client of TransferQueue are the
    trainer's own, so a refill from another thread would use them from two at a time."""
    with services() as settings:
        life = of_turnout(tmp_path, settings, steps=5, slow=frozenset({3}), broken=frozenset({1, 2, 27, 28}))
        with BufferClient(settings["buffer"]) as buffer:
            ledger = buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition="train"))
    assert life.trainer.modes[3] == "4 rollout"
    assert (ledger.evicted, ledger.credits_created, ledger.credits_paid) == (4, 4, 4)
    warm_up, *refills = life.trainer.refills
    assert warm_up == (threading.get_ident(), GROUPS)
    assert {thread for thread, _ in refills} == {threading.get_ident()}
    assert sum(count for _, count in refills) == 4
    assert [seen["batch/outputs"] for seen in life.trainer.seen] == [GROUPS * N] * 5
    assert {tag["status"] for tag in life.left.values()} == {"finished", "success"}


@pytest.mark.parametrize("policy", ["jit", "shadow:jit"])
def test_other_policies_decide_from_progress_read_in_verls_servers(tmp_path: Path, policy: str) -> None:
    with services() as settings:
        life = of_turnout(tmp_path, settings | {"policy": policy}, steps=6)
        with SchedulerClient(settings["scheduler"]) as scheduler:
            request = scheduler_pb2.WatchRunRequest(run_id=RUN, from_sequence=1, no_follow=True)
            events = list(scheduler.watch_run(request))
    assert len(life.trainer.seen) == 6
    assert all(seen["batch/outputs"] == GROUPS * N for seen in life.trainer.seen)
    known = [report for report in life.progress if report.requests]
    assert known, "no request was ever seen in a server"
    assert all(request.HasField("join_key") for report in known for request in report.requests)
    assert max(report.covered_share for report in known) == 1.0
    made = [event.decision_made for event in events if event.HasField("decision_made")]
    assert {decision.policy for decision in made} == {policy}
    if policy == "jit":
        assert any("so verl decides" not in decision.reason for decision in made)
    else:
        assert all("In the shadow jit would" in decision.reason for decision in made)
    # The scheduler reads the counters every few seconds, and each request lives for a tenth of one.
    assert life.counted == life.made
