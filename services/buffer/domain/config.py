"""RunConfig: everything that shapes a run, with defaults filled in and validated together.

Invariant: a RunConfig that passed `validate` holds only values the rest of the domain can use without another check.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum

from services.buffer.domain.caps import Caps
from services.runtime.errors import TurnoutError, failed_precondition, invalid_argument, require_id

# Bounds the work one claim or one result can cause; far above any n in use.
MAX_GROUP_SIZE = 65_536
# Bounds on the items of one call or stream batch, since all other calls wait while they are dealt with: some 50 ms of
# prompts, ids or results.
MAX_GROUPS_PER_CALL = 4096
MAX_ITEMS_PER_CALL = 2048
# Upper bound of every duration, so that deadlines stay finite numbers.
MAX_SECONDS = 30 * 86_400.0


class TrainerMode(Enum):
    """How trainer and rollout share GPUs; the numbers are those of the wire."""

    SEPARATE_ASYNC = 1
    COLOCATE_ASYNC = 2
    SYNC = 3


class Strategy(Enum):
    """What happens to groups that are too old."""

    DROP = 1
    WAIT = 2
    GATE = 3


class PartitionKind(Enum):
    """Which rules hold in a partition."""

    TRAINING = 1
    VALIDATION = 2


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """One partition; `group_size` is the n of groups that do not say."""

    name: str
    kind: PartitionKind = PartitionKind.TRAINING
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class Staleness:
    """Bound on age: `max_versions` is the largest span that may be sampled, None is no bound."""

    max_versions: int | None = None
    strategy: Strategy = Strategy.DROP


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Lives of claims, sample leases and unnamed uploads, in domain seconds."""

    claim: float = 600.0
    sample: float = 600.0
    payload: float = 600.0


DEFAULT_PARTITIONS = (PartitionConfig("train"), PartitionConfig("val", PartitionKind.VALIDATION))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configuration of one run."""

    trainer_mode: TrainerMode = TrainerMode.SEPARATE_ASYNC
    partitions: tuple[PartitionConfig, ...] = DEFAULT_PARTITIONS
    train_batch_size: int | None = None
    staleness: Staleness = field(default_factory=Staleness)
    group_filter_metric: str | None = None
    refill: bool = True
    partial_rollout: bool = True
    max_attempts: int = 1
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    caps: Caps = field(default_factory=Caps)

    def validate(self) -> None:
        """Raise INVALID_ARGUMENT naming the first field that is wrong."""
        if self.trainer_mode is TrainerMode.SYNC:
            message = "a synchronous trainer leaves no idle GPUs to lend"
            raise invalid_argument("config.trainer_mode", message, value="SYNC", reason="SYNC_UNSUPPORTED")
        self._validate_partitions()
        for name, value in self._counts():
            if value is not None and value < 1:
                raise _out_of_range(f"config.{name}", value, "at least 1")
        rate = self.caps.max_request_rate
        if rate is not None and not 0 < rate < math.inf:
            raise _out_of_range("config.caps.max_request_rate", rate, "finite and above 0")
        if self.staleness.strategy is Strategy.GATE and self.train_batch_size is None:
            raise invalid_argument(
                "config.train_batch_size", "the GATE strategy needs train_batch_size", reason="REQUIRED"
            )
        if self.group_filter_metric is not None and not self.group_filter_metric:
            raise _out_of_range("config.group_filter_metric", "", "the name of a reward, or left out")
        for spec in fields(self.lease_times):
            seconds: float = getattr(self.lease_times, spec.name)
            if not 0 < seconds <= MAX_SECONDS:
                raise _out_of_range(f"config.lease_times.{spec.name}", seconds, "above 0 and at most 30 days")

    def _validate_partitions(self) -> None:
        seen: set[str] = set()
        for position, partition in enumerate(self.partitions):
            where = f"config.partitions[{position}]"
            require_id(f"{where}.name", partition.name)
            if partition.name in seen:
                message = f"two partitions are named {partition.name!r}"
                raise invalid_argument(f"{where}.name", message, value=partition.name, reason="DUPLICATE")
            seen.add(partition.name)
            check_group_size(f"{where}.default_group_size", partition.group_size)

    def _counts(self) -> Iterator[tuple[str, int | None]]:
        yield "train_batch_size", self.train_batch_size
        yield "staleness.max_versions", self.staleness.max_versions
        yield "max_attempts", self.max_attempts
        yield "caps.max_groups", self.caps.max_groups
        yield "caps.max_bytes", self.caps.max_bytes
        yield "caps.max_parked_waits", self.caps.max_parked_waits

    def check_replaces(self, old: "RunConfig") -> None:
        """Raise FAILED_PRECONDITION / IMMUTABLE_FIELD if this configuration cannot follow `old` in a living run."""
        for name in ("trainer_mode", "partitions"):
            if getattr(self, name) != getattr(old, name):
                raise failed_precondition(
                    "IMMUTABLE_FIELD", f"config.{name} cannot change while the run lives", field=f"config.{name}"
                )

    @property
    def gate_limit(self) -> int | None:
        """Running + finished groups at which the GATE closes; None when there is no gate."""
        staleness = self.staleness
        if staleness.strategy is not Strategy.GATE or staleness.max_versions is None or self.train_batch_size is None:
            return None
        return staleness.max_versions * self.train_batch_size


def check_group_size(name: str, size: int) -> None:
    """Raise INVALID_ARGUMENT / OUT_OF_RANGE unless 1 <= size <= 65 536."""
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise _out_of_range(name, size, f"1 to {MAX_GROUP_SIZE}")


def check_items(name: str, count: int, limit: int) -> None:
    """Raise INVALID_ARGUMENT / TOO_MANY_ITEMS if a call brings more than `limit`."""
    if count > limit:
        message = f"one call brings at most {limit} of {name}, not {count}"
        raise invalid_argument(name, message, value=count, reason="TOO_MANY_ITEMS", limit=limit)


def _out_of_range(name: str, value: object, allowed: str) -> TurnoutError:
    return invalid_argument(name, f"{name} must be {allowed}, it is {value!r}", value=value, reason="OUT_OF_RANGE")
