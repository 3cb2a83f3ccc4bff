"""Requests to the domain's words, and back.

Invariant: what is absent in a message stays absent or gets the default of the domain, never protobuf's zero.
"""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.duration_pb2 import Duration

from services.runtime.errors import invalid_argument
from services.runtime.waits import duration_of, duration_seconds
from services.scheduler.convert_events import timestamp
from services.scheduler.domain.config import (
    DEFAULT_IDLE_TOLERANCE_S,
    DEFAULT_PARTITION,
    DEFAULT_POLICY,
    DEFAULT_TRAINER_LEASE_S,
    RunConfig,
    refused,
)
from services.scheduler.domain.events import DecisionAction
from services.scheduler.domain.holdings import Gpu
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.resume import Resume
from services.scheduler.domain.run import Run
from services.scheduler.policies.config import SwitchConfig
from services.scheduler.policies.errors import FieldError
from services.scheduler.policies.types import Action, Decision, Placement, RequestKey
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

_SWITCH_FIELDS = tuple(SwitchConfig.__dataclass_fields__)


def switch_from_proto(message: scheduler_pb2.SwitchConfig, base: SwitchConfig) -> SwitchConfig:
    """`base` with what the message sets. Raises INVALID_ARGUMENT naming the field."""
    given = {name: getattr(message, name) for name in _SWITCH_FIELDS if message.HasField(name)}  # type: ignore[arg-type]
    try:
        return replace(base, **given)
    except FieldError as error:
        raise refused(error) from error


def config_from_proto(message: scheduler_pb2.RunConfig) -> RunConfig:
    """The configuration, defaults filled in; `domain.config.check` judges it."""
    return RunConfig(
        switch=switch_from_proto(message.switch, SwitchConfig()),
        policy=message.policy or DEFAULT_POLICY,
        train_batch_size=message.train_batch_size,
        parameter_sync_step=message.parameter_sync_step,
        mini_batch_size=message.mini_batch_size,
        total_training_steps=message.total_training_steps,
        hybrid_gpus=message.hybrid_gpus,
        standalone_gpus=message.standalone_gpus,
        idle_tolerance_s=_duration(message, "idle_tolerance", DEFAULT_IDLE_TOLERANCE_S),
        partition=message.partition or DEFAULT_PARTITION,
        disaggregated_rollout=message.disaggregated_rollout,
        num_warmup_batches=message.num_warmup_batches,
        group_size=message.group_size if message.HasField("group_size") else 1,
        max_response_tokens=message.max_response_tokens if message.HasField("max_response_tokens") else None,
        can_reinstall=message.can_reinstall,
        trainer_lease_s=_duration(message, "trainer_lease", DEFAULT_TRAINER_LEASE_S),
        engine_timeout_s=_duration(message, "engine_timeout", 0.0) if message.HasField("engine_timeout") else None,
        external_data=message.external_data,
        hybrid_devices=tuple(Gpu(gpu.node, gpu.uuid) for gpu in message.hybrid_devices),
    )


def _duration(message: scheduler_pb2.RunConfig, name: str, default: float) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]
        return default
    return duration_seconds(getattr(message, name), f"config.{name}")


def config_to_proto(config: RunConfig) -> scheduler_pb2.RunConfig:
    """The configuration with every default filled in."""
    message = scheduler_pb2.RunConfig(
        switch=scheduler_pb2.SwitchConfig(**{name: getattr(config.switch, name) for name in _SWITCH_FIELDS}),
        policy=config.policy,
        train_batch_size=config.train_batch_size,
        parameter_sync_step=config.parameter_sync_step,
        mini_batch_size=config.mini_batch_size,
        total_training_steps=config.total_training_steps,
        hybrid_gpus=config.hybrid_gpus,
        standalone_gpus=config.standalone_gpus,
        idle_tolerance=duration_of(config.idle_tolerance_s),
        partition=config.partition,
        disaggregated_rollout=config.disaggregated_rollout,
        num_warmup_batches=config.num_warmup_batches,
        group_size=config.group_size,
        max_response_tokens=config.max_response_tokens,
        can_reinstall=config.can_reinstall,
        trainer_lease=duration_of(config.trainer_lease_s),
        engine_timeout=None if config.engine_timeout_s is None else duration_of(config.engine_timeout_s),
        external_data=config.external_data,
    )
    for gpu in config.hybrid_devices:
        message.hybrid_devices.add(node=gpu.node, uuid=gpu.uuid)
    return message


def resume_from_proto(request: scheduler_pb2.OpenRunRequest) -> Resume | None:
    """Where the trainer stands, None for a new run."""
    if not request.HasField("resume"):
        return None
    message = request.resume
    if message.resume_step < 0:
        raise invalid_argument("resume.resume_step", "resume_step must be at least 0", value=message.resume_step)
    return Resume(
        message.resume_step,
        message.checkpoint_id if message.WhichOneof("source") == "checkpoint_id" else "",
        message.keep_live if message.WhichOneof("source") == "keep_live" else False,
    )


def lend_to_proto(lend: Lend) -> scheduler_pb2.Lend:
    """A lend for the trainer."""
    return scheduler_pb2.Lend(
        lend_id=lend.lend_id,
        kind=lend.kind,  # type: ignore[arg-type]
        replica_ids=lend.replica_ids,
        weight_version=lend.weight_version,
        update_standalone=lend.update_standalone,
        allow_older=lend.allow_older,
    )


def decision_to_proto(decision: Decision | None) -> scheduler_pb2.Decision | None:
    """A decision with its numbers; None stays None."""
    if decision is None:
        return None
    wait_s = decision.predicted_wait_s
    return scheduler_pb2.Decision(
        action=DecisionAction[decision.action.name],  # type: ignore[arg-type]
        reason=decision.reason,
        numbers=dict(decision.numbers),
        predicted_wait=None if wait_s is None else duration_of(max(0.0, wait_s)),
        threshold=decision.threshold,
        placement=None if decision.placement is None else placement_to_proto(decision.placement),
    )


def decision_from_proto(message: scheduler_pb2.Decision) -> Decision:
    """What `decision_to_proto` was given, but for what it leaves out: recheck_at."""
    wait_s = duration_seconds(message.predicted_wait, "predicted_wait") if message.HasField("predicted_wait") else None
    return Decision(
        action=Action[DecisionAction(message.action).name],
        reason=message.reason,
        predicted_wait_s=wait_s,
        numbers=dict(message.numbers),
        threshold=message.threshold if message.HasField("threshold") else None,
        placement=_placement(message.placement) if message.HasField("placement") else None,
    )


def placement_to_proto(placement: Placement, partition: str = "") -> engine_pb2.Placement:
    """Where running requests of `partition` go on."""
    message = engine_pb2.Placement()
    for key in placement.hybrid:
        message.hybrid.add(partition=partition, group_id=key.group, trajectory=key.trajectory)
    for key in placement.standalone:
        message.standalone.add(partition=partition, group_id=key.group, trajectory=key.trajectory)
    return message


def _placement(message: engine_pb2.Placement) -> Placement:
    hybrid = tuple(RequestKey(key.group_id, key.trajectory) for key in message.hybrid)
    return Placement(hybrid, tuple(RequestKey(key.group_id, key.trajectory) for key in message.standalone))


def run_to_proto(run: Run, now: float, scale: float, buffer_target: str, engine_target: str) -> scheduler_pb2.Run:
    """A run as the contract shows it. `now` in domain seconds; the lease is shown in wall time."""
    lend = run.lends.open
    return scheduler_pb2.Run(
        run_id=run.run_id,
        config=config_to_proto(run.config),
        epoch=run.epoch,
        mode=run.mode,  # type: ignore[arg-type]
        step=run.step,
        expected_calls=[str(key) for key in run.order.expected()] if run.is_open else [],
        lend=None if lend is None else lend_to_proto(lend),
        open=run.is_open,
        stuck_reason=run.modes.stuck_reason,
        last_sequence=run.log.last,
        opened_at=timestamp(run.opened_wall),
        buffer_target=buffer_target,
        engine_target=engine_target,
        lends=run.lends.completed,
        reclaims=run.reclaims,
        lease=duration_of(run.lease.left_s(now) * scale) if run.is_open else Duration(),
    )
