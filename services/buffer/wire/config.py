"""RunConfig and Run on the wire.

Invariant: what is read back has every default filled in, and reading that again gives the same configuration.
"""

from google.protobuf.duration_pb2 import Duration

from services.buffer.domain.caps import Caps
from services.buffer.domain.config import (
    DEFAULT_PARTITIONS,
    LeaseTimes,
    PartitionConfig,
    PartitionKind,
    RunConfig,
    Staleness,
    Strategy,
    TrainerMode,
)
from services.buffer.domain.run import Run
from services.buffer.wire.scalars import duration, enum_of, int64, timestamp
from services.runtime.waits import duration_seconds
from turnout.buffer.v1 import buffer_pb2 as pb


def config_from(message: pb.RunConfig) -> RunConfig:
    """The configuration a client sent, defaults filled in; not validated yet."""
    defaults = RunConfig()
    return RunConfig(
        trainer_mode=enum_of(TrainerMode, message.trainer_mode, "config.trainer_mode", defaults.trainer_mode),
        partitions=tuple(
            PartitionConfig(
                partition.name,
                enum_of(PartitionKind, partition.kind, f"config.partitions[{position}].kind", PartitionKind.TRAINING),
                partition.default_group_size if partition.HasField("default_group_size") else 1,
            )
            for position, partition in enumerate(message.partitions)
        )
        or DEFAULT_PARTITIONS,
        train_batch_size=message.train_batch_size if message.HasField("train_batch_size") else None,
        staleness=_staleness_from(message.staleness),
        group_filter_metric=message.group_filter_metric if message.HasField("group_filter_metric") else None,
        refill=message.refill if message.HasField("refill") else defaults.refill,
        partial_rollout=message.partial_rollout if message.HasField("partial_rollout") else defaults.partial_rollout,
        max_attempts=message.max_attempts if message.HasField("max_attempts") else defaults.max_attempts,
        lease_times=_lease_times_from(message.lease_times),
        caps=_caps_from(message.caps),
    )


def _staleness_from(message: pb.Staleness) -> Staleness:
    return Staleness(
        message.max_versions if message.HasField("max_versions") else None,
        enum_of(Strategy, message.strategy, "config.staleness.strategy", Strategy.DROP),
    )


def _lease_times_from(message: pb.LeaseTimes) -> LeaseTimes:
    defaults = LeaseTimes()

    def seconds(present: bool, value: Duration, name: str, default: float) -> float:
        return duration_seconds(value, f"config.lease_times.{name}") if present else default

    return LeaseTimes(
        claim=seconds(message.HasField("claim"), message.claim, "claim", defaults.claim),
        sample=seconds(message.HasField("sample"), message.sample, "sample", defaults.sample),
        payload=seconds(message.HasField("payload"), message.payload, "payload", defaults.payload),
    )


def _caps_from(message: pb.Caps) -> Caps:
    defaults = Caps()
    return Caps(
        max_groups=message.max_groups if message.HasField("max_groups") else defaults.max_groups,
        max_bytes=message.max_bytes if message.HasField("max_bytes") else defaults.max_bytes,
        max_parked_waits=(
            message.max_parked_waits if message.HasField("max_parked_waits") else defaults.max_parked_waits
        ),
        max_request_rate=message.max_request_rate if message.HasField("max_request_rate") else None,
    )


def config_to(config: RunConfig) -> pb.RunConfig:
    """The configuration with every default filled in."""
    return pb.RunConfig(
        trainer_mode=pb.TrainerMode.ValueType(config.trainer_mode.value),
        partitions=[
            pb.PartitionConfig(
                name=partition.name,
                kind=pb.PartitionKind.ValueType(partition.kind.value),
                default_group_size=partition.group_size,
            )
            for partition in config.partitions
        ],
        train_batch_size=config.train_batch_size,
        staleness=pb.Staleness(
            max_versions=config.staleness.max_versions,
            strategy=pb.StalenessStrategy.ValueType(config.staleness.strategy.value),
        ),
        group_filter_metric=config.group_filter_metric,
        refill=config.refill,
        partial_rollout=config.partial_rollout,
        max_attempts=config.max_attempts,
        lease_times=pb.LeaseTimes(
            claim=duration(config.lease_times.claim),
            sample=duration(config.lease_times.sample),
            payload=duration(config.lease_times.payload),
        ),
        caps=pb.Caps(
            max_groups=config.caps.max_groups,
            max_bytes=config.caps.max_bytes,
            max_parked_waits=config.caps.max_parked_waits,
            max_request_rate=config.caps.max_request_rate,
        ),
    )


def run_to(run: Run) -> pb.Run:
    """A run as clients see it."""
    return pb.Run(
        run_id=run.run_id,
        config=config_to(run.state.config),
        epoch=run.state.epoch,
        current_step=int64(run.state.step),
        created_at=timestamp(run.created_at),
    )
