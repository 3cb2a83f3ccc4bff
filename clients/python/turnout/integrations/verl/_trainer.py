"""verl's separate asynchronous trainer with its decisions made by the scheduler and its replicas driven by the
controller.

Invariants: data, training, validation and checkpoints are verl's own code; what verl decides or does to replicas in its
hooks is done by Turnout instead, never besides; with switching off the same calls reach the same replicas as in verl.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync

from turnout.client import AlreadyExists, EngineClient, NotFound, duration
from turnout.engine.v1 import engine_pb2
from turnout.integrations.verl import _replicas
from turnout.integrations.verl._agent_loop import setup_of
from turnout.integrations.verl._buffer import ReplayBuffer
from turnout.integrations.verl._queue import TRAIN
from turnout.integrations.verl._requests import LLMServerClient
from turnout.integrations.verl._weights import ActorWorker, WeightMover
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import TrainerHooks, TrainerSetup, WeightTarget, resume_from

_log = logging.getLogger("turnout")

MODE: Final = "turnout"
"""`trainer.v1.trainer_mode`."""

MANIFEST: Final = "turnout.json"
"""The manifest of a Save, in verl's folder of the step."""

_OWN_MOVER: Final = '{"mover": "own"}'
_TIMING: Final = "timing_s/"
_HYBRID, _STANDALONE = engine_pb2.REPLICA_ROLE_HYBRID, engine_pb2.REPLICA_ROLE_STANDALONE


@register_trainer(MODE)
class Trainer(PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=turnout`."""

    def __init__(self, config: Any) -> None:
        """Raises ValueError naming a setting that is wrong; calls no service yet."""
        self._setup_of_run = setup_of(config)
        self._setup_of_run.check_services()
        if config.skip.rollout_tq.enable:
            raise ValueError("skip.rollout_tq replaces samples by recorded ones, which the index knows nothing of")
        with open_dict(config):
            # Everything in verl but the choice of this class goes by the mode that it is.
            config.trainer.v1.trainer_mode = "separate_async"
        self._hooks: TrainerHooks | None = None
        self._start_epoch = 0
        self._sync_metrics: dict[str, Any] = {}
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        sampler = self.config.trainer.v1.sampler
        custom = sampler.get("custom_sampler") or {}
        if custom.get("path"):
            buffer = super()._build_replay_buffer()
            if not isinstance(buffer, ReplayBuffer):
                raise TypeError(f"custom_sampler is {type(buffer).__name__}: leave it out, or name Turnout's")
            return buffer
        return ReplayBuffer(
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.separate_async,
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
        )

    # -------------------------------------------------------------------------------------------------------- replicas

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(ActorWorker)

    @property
    def checkpoint_manager(self) -> WeightMover:
        """Moves weights to the hybrid replicas."""
        return self._hybrid_mover

    @checkpoint_manager.setter
    def checkpoint_manager(self, manager: Any) -> None:
        # verl makes it when the replicas are there, and asks it next to put them to sleep.
        self._hybrid_mover = WeightMover.instead_of(manager, self._sleep_hybrids)

    @property
    def standalone_checkpoint_manager(self) -> WeightMover:
        """Moves weights to the standalone replicas."""
        return self._standalone_mover

    @standalone_checkpoint_manager.setter
    def standalone_checkpoint_manager(self, manager: Any) -> None:
        self._standalone_mover = WeightMover.instead_of(manager, _nothing)

    def _setup(self) -> None:
        super()._setup()
        self._balancer_name = _replicas.name_balancer(
            self.standalone_server_manager.global_load_balancer, self._setup_of_run.balancer
        )
        self._register(self.standalone_checkpoint_manager.replicas, _STANDALONE)

    def _sleep_hybrids(self) -> None:
        """Register the hybrid replicas while they serve, and have them put to sleep: verl loads its checkpoint next."""
        run_id = self._setup_of_run.run_id
        client = self._engine = EngineClient(self._setup_of_run.engine)
        self._start_epoch = client.calls.OpenEpoch(engine_pb2.OpenEpochRequest(run_id=run_id)).epoch
        replicas = self.checkpoint_manager.replicas
        if replicas:
            self._register(replicas, _HYBRID)
            client.calls.Sleep(
                engine_pb2.SleepRequest(
                    run_id=run_id, epoch=self._start_epoch, selector=engine_pb2.ReplicaSelector(roles=[_HYBRID])
                )
            )

    def _register(self, replicas: list[Any], role: engine_pb2.ReplicaRole.ValueType) -> None:
        run_id = self._setup_of_run.run_id
        for replica in replicas:
            spec = _replicas.spec_of(replica, role, None)
            request = engine_pb2.RegisterRequest(run_id=run_id, spec=spec, epoch=self._start_epoch)
            try:
                self._engine.calls.Register(request)
            except AlreadyExists:
                # What a former trainer had under this rank.
                self._engine.calls.Deregister(
                    engine_pb2.DeregisterRequest(run_id=run_id, replica_id=spec.replica_id, epoch=self._start_epoch)
                )
                self._engine.calls.Register(request)

    def add_replicas_to_balancer(self) -> None:
        """The controller tells the balancer, once they serve."""

    def get_llm_client(self) -> LLMServerClient:
        """verl's client, whose request ids say whose they are."""
        client: LLMServerClient = self.standalone_server_manager.get_client(client_cls=LLMServerClient)
        return client

    def _move_weights(self, target: WeightTarget) -> None:
        """The callback of the hooks: verl's own means move the bytes."""
        began = time.perf_counter()
        hybrid = target.role == _HYBRID
        mover = self.checkpoint_manager if hybrid else self.standalone_checkpoint_manager
        metrics = mover.move([_replicas.rank_of(each) for each in target.replica_ids], target.weight_version)
        self._open_hooks.move_bytes(target, b"", info_json=_OWN_MOVER)
        if not hybrid:
            self._sync_metrics.update(metrics)
            self._time("update_weights", time.perf_counter() - began)

    # ----------------------------------------------------------------------------------------------------------- hooks

    def fit(self, agent_loop_manager: Any) -> None:
        """As verl's; the run is closed in the end, and left open for a resume if it raises."""
        try:
            super().fit(agent_loop_manager)
        except BaseException:
            try:
                self._close(None)
            except Exception:
                # What ended the training is what its user has to see.
                _log.exception("what belongs to run %s was not all closed", self._setup_of_run.run_id)
            raise
        self._close("finished")

    def _close(self, reason: str | None) -> None:
        """Close everything, whichever of it fails; with a reason, the run at the scheduler too."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.replay_buffer.index.close)
            stack.callback(self._engine.close)
            if self._hooks is not None:
                stack.callback(self._hooks.close, reason=reason)

    def on_init_end(self) -> None:
        """Open the run, and bring the weights to all replicas."""
        index = self.replay_buffer.index
        index.start()
        self._hooks = self._open()
        index.epoch, index.cursor = self._hooks.epoch, self._hooks.cursor
        self._hooks.on_init_end()
        self._follow_mode()

    def on_step_begin(self) -> None:
        """Take the GPUs back, if enough groups are ready."""
        if self.hybrid_rollout_config.enable_switch:
            self.timing_raw["switch_wait"] = 0.0
        lent, began = self.current_mode is HybridEngineMode.ROLLOUT, time.perf_counter()
        self._open_hooks.on_step_begin(self.global_steps)
        self._follow_mode()
        if lent and self.current_mode is HybridEngineMode.TRAINER:
            self._time("switch_to_trainer", time.perf_counter() - began)

    def _wait_for_sampleable_and_switch(self) -> dict[str, float]:
        """Called by verl's prepare_step, after it added the step's prompts."""
        hooks, index = self._open_hooks, self.replay_buffer.index
        hooks.cursor = index.cursor
        metrics = self._timed(hooks.prepare_step(self.global_steps))
        index.cursor = hooks.cursor
        if any(name.endswith("/evicted_samples") for name in metrics):
            index.sweep()
        self._follow_mode()
        return metrics

    def on_sample_begin(self) -> None:
        """Announce the mini-batch; what is evicted meanwhile is told by the sample."""
        hooks = self._open_hooks
        hooks.cursor = self.replay_buffer.index.cursor
        hooks.on_sample_begin(self.global_steps, self.local_trigger_step)

    def on_sample_end(self) -> None:
        """Report the wait for it."""
        self._open_hooks.on_sample_end(self.global_steps, self.local_trigger_step)

    def on_step_end(self) -> None:
        """Let the scheduler decide, and bring the step's weights to the replicas."""
        if self.prev_step_profile:
            self._stop_rollout_profiling()
        self._sync_metrics = {}
        metrics = self._timed(self._open_hooks.on_step_end(self.global_steps))
        self._pending_sync_metrics = {**self._sync_metrics, **metrics}
        self._follow_mode()

    def on_validate_begin(self) -> None:
        """Make all GPUs available."""
        self._open_hooks.on_validate_begin(self.global_steps)
        self._follow_mode()

    def on_validate_end(self) -> None:
        """The GPUs stay lent."""
        self._open_hooks.on_validate_end(self.global_steps)

    def _save_checkpoint(self) -> None:
        """Write the manifest of the scheduler's state, then verl's checkpoint and last its marker file."""
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{MANIFEST}.part"
        with part.open("w") as file:
            file.write(self._open_hooks.save(self.global_steps))
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / MANIFEST)
        super()._save_checkpoint()

    # --------------------------------------------------------------------------------------------------------- inside

    @property
    def _open_hooks(self) -> TrainerHooks:
        if self._hooks is None:
            raise RuntimeError("init() opens the run, and comes first")
        return self._hooks

    def _open(self) -> TrainerHooks:
        resume = self._resume()
        try:
            return TrainerHooks.open(self._trainer_setup(resume))
        except NotFound as error:
            if error.reason != "CHECKPOINT_NOT_FOUND" or resume is None:
                raise
            _log.warning("the scheduler does not keep %s any more; its policy begins anew", resume.checkpoint_id)
            return TrainerHooks.open(self._trainer_setup(_keep_live(resume.resume_step)))

    def _resume(self) -> scheduler_pb2.Resume | None:
        if not self.global_steps:
            return None
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir, f"global_step_{self.global_steps}")
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        with contextlib.suppress(FileNotFoundError):
            return resume_from((folder / MANIFEST).read_text(), self.global_steps)
        # A checkpoint from before Turnout was there.
        return _keep_live(self.global_steps)

    def _trainer_setup(self, resume: scheduler_pb2.Resume | None) -> TrainerSetup:
        setup, config, index = self._setup_of_run, self.config, self.replay_buffer.index
        switch, rollout = self.hybrid_rollout_config, config.actor_rollout_ref.rollout
        return TrainerSetup(
            setup.run_id,
            scheduler_pb2.RunConfig(
                switch=scheduler_pb2.SwitchConfig(
                    enable_switch=switch.enable_switch,
                    switch_threshold_ratio=switch.switch_threshold_ratio,
                    adaptive_switch_threshold=switch.adaptive_switch_threshold,
                    switch_threshold_step_up=switch.switch_threshold_step_up,
                    switch_threshold_step_down=switch.switch_threshold_step_down,
                    switch_threshold_release_steps=switch.switch_threshold_release_steps,
                    switch_cost_window_size=switch.switch_cost_window_size,
                ),
                policy=setup.policy,
                train_batch_size=config.data.train_batch_size,
                parameter_sync_step=self.parameter_sync_step,
                mini_batch_size=config.data.train_batch_size // self.parameter_sync_step,
                total_training_steps=self.total_training_steps,
                hybrid_gpus=config.trainer.nnodes * config.trainer.n_gpus_per_node
                if self._enable_hybrid_replicas
                else 0,
                standalone_gpus=rollout.nnodes * rollout.n_gpus_per_node,
                idle_tolerance=duration(setup.poll_interval),
                partition=TRAIN,
                num_warmup_batches=config.trainer.v1.separate_async.num_warmup_batches,
                group_size=rollout.n,
                max_response_tokens=rollout.response_length,
                external_data=True,
            ),
            scheduler=setup.scheduler,
            buffer=setup.buffer,
            engine=setup.engine,
            refills=index,
            update_weights=self._move_weights,
            on_progress=lambda _: index.look(TRAIN),
            resume=resume,
            take_over=setup.take_over,
        )

    def _follow_mode(self) -> None:
        lent = self._open_hooks.mode == events_pb2.MODE_ROLLOUT
        self.current_mode = HybridEngineMode.ROLLOUT if lent else HybridEngineMode.TRAINER

    def _time(self, name: str, seconds: float) -> None:
        timing = getattr(self, "timing_raw", None)
        if timing is not None:
            timing[name] = timing.get(name, 0.0) + seconds

    def _timed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Put the timings where verl keeps its own; the others."""
        for name, value in metrics.items():
            if name.startswith(_TIMING):
                self.timing_raw[name.removeprefix(_TIMING)] = value
        return {name: value for name, value in metrics.items() if not name.startswith(_TIMING)}


def _nothing() -> None:
    """Standalone replicas never sleep."""


def _keep_live(step: int) -> scheduler_pb2.Resume:
    return scheduler_pb2.Resume(resume_step=step, keep_live=True)
