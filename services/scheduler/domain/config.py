"""What a run is configured with.

Invariants: a configuration that exists is valid, also while switching is off; every refusal names the field; a run
without hybrid GPUs never switches, whatever `enable_switch` says, since there is nothing to move (as in verl).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

from services.runtime.errors import (
    TurnoutError,
    failed_precondition,
    invalid_argument,
    require_id,
    require_non_negative,
    require_positive,
)
from services.scheduler import policies
from services.scheduler.domain.holdings import Gpu
from services.scheduler.policies.base import Policy
from services.scheduler.policies.config import PolicyConfig, SwitchConfig
from services.scheduler.policies.config import RunConfig as PolicyRunConfig
from services.scheduler.policies.errors import FieldError, UnknownPolicyError

PolicyFactory = Callable[[str, PolicyConfig], Policy]
"""What `policies.create` is: a new policy by its name. Raises UnknownPolicyError."""

DEFAULT_POLICY = "jit"
DEFAULT_PARTITION = "train"
DEFAULT_IDLE_TOLERANCE_S = 2.0
"""The interval at which verl polls its buffer: no shorter wait shows there."""

DEFAULT_TRAINER_LEASE_S = 60.0
"""Outlasts a stall of the trainer's process, and a restarted trainer does not wait long for it to run out."""

_MOST_WARMUP_GROUPS = 2**53
"""Up to here a product of batches is exact, and it fits into the int64 that answers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything the scheduler knows of a run; fields as in scheduler.proto, durations in seconds.

    engine_timeout_s: wall seconds for one engine transition on one replica, None: the controller's own.
    """

    switch: SwitchConfig = field(default_factory=SwitchConfig)
    policy: str = DEFAULT_POLICY
    train_batch_size: int
    parameter_sync_step: int
    mini_batch_size: int
    total_training_steps: int
    hybrid_gpus: int
    standalone_gpus: int
    idle_tolerance_s: float = DEFAULT_IDLE_TOLERANCE_S
    partition: str = DEFAULT_PARTITION
    disaggregated_rollout: bool = False
    num_warmup_batches: float = 0.0
    group_size: int = 1
    max_response_tokens: int | None = None
    can_reinstall: bool = False
    trainer_lease_s: float = DEFAULT_TRAINER_LEASE_S
    engine_timeout_s: float | None = None
    external_data: bool = False
    hybrid_devices: tuple[Gpu, ...] = ()

    @property
    def switching(self) -> bool:
        """Whether GPUs are lent after the first reclaim."""
        return self.switch.enable_switch and self.hybrid_gpus > 0

    @property
    def warmup_groups(self) -> int:
        """Prompts of the warm-up. A fraction of a prompt is left out."""
        return math.floor(self.num_warmup_batches * self.train_batch_size)

    @property
    def policy_config(self) -> PolicyConfig:
        """What the policy is told."""
        return PolicyConfig(
            run=PolicyRunConfig(
                train_batch_size=self.train_batch_size,
                mini_batch_size=self.mini_batch_size,
                total_training_steps=self.total_training_steps,
                hybrid_gpus=self.hybrid_gpus,
                standalone_gpus=self.standalone_gpus,
                idle_tolerance_s=self.idle_tolerance_s,
                group_size=self.group_size,
                max_response_length=self.max_response_tokens,
                reinstall_within_step=self.can_reinstall,
            ),
            switch=replace(self.switch, enable_switch=self.switching),
        )

    def as_json(self) -> str:
        """Every field, defaults filled in, as one JSON object."""
        return _json_of(self)

    @classmethod
    def of_json(cls, text: str) -> RunConfig:
        """What `as_json` wrote. Raises ValueError or TypeError for what this version does not know."""
        values = json.loads(text)
        values["switch"] = SwitchConfig(**values["switch"])
        values["hybrid_devices"] = tuple(Gpu(**gpu) for gpu in values["hybrid_devices"])
        return cls(**values)


@lru_cache(maxsize=256)
def _json_of(config: RunConfig) -> str:
    """Remembered: what is kept of a run is written at each of its turns."""
    return json.dumps(asdict(config), sort_keys=True)


def check(config: RunConfig, create: PolicyFactory = policies.create) -> RunConfig:
    """Return `config`, or refuse it.

    INVALID_ARGUMENT names the field; FAILED_PRECONDITION with NO_STANDALONE_GPUS or DISAGGREGATED_ROLLOUT refuses what
    is legal alone but not with switching on.
    """
    require_id("config.partition", config.partition)
    _check_devices(config.hybrid_devices)
    require_non_negative("config.num_warmup_batches", config.num_warmup_batches)
    if config.num_warmup_batches * config.train_batch_size > _MOST_WARMUP_GROUPS:
        raise invalid_argument(
            "config.num_warmup_batches",
            f"a warm-up has at most {_MOST_WARMUP_GROUPS} groups",
            value=config.num_warmup_batches,
            train_batch_size=config.train_batch_size,
        )
    require_positive("config.trainer_lease", config.trainer_lease_s)
    if config.engine_timeout_s is not None:
        require_positive("config.engine_timeout", config.engine_timeout_s)
    require_positive("config.parameter_sync_step", config.parameter_sync_step)
    require_positive("config.mini_batch_size", config.mini_batch_size)
    if config.train_batch_size != config.parameter_sync_step * config.mini_batch_size:
        raise invalid_argument(
            "config.train_batch_size",
            f"train_batch_size must be parameter_sync_step x mini_batch_size, {config.parameter_sync_step} x "
            f"{config.mini_batch_size}, not {config.train_batch_size}",
            value=config.train_batch_size,
            parameter_sync_step=config.parameter_sync_step,
            mini_batch_size=config.mini_batch_size,
        )
    if config.switch.enable_switch:
        if config.disaggregated_rollout:
            raise failed_precondition(
                "DISAGGREGATED_ROLLOUT",
                "prefill-decode disaggregated rollout cannot be switched: leave enable_switch off",
                field="config.disaggregated_rollout",
                value=True,
            )
        if config.standalone_gpus == 0:
            raise failed_precondition(
                "NO_STANDALONE_GPUS",
                "with enable_switch, at least one GPU must generate while the trainer trains",
                field="config.standalone_gpus",
                value=0,
            )
    try:
        create(config.policy, config.policy_config)
    except FieldError as error:
        raise refused(error) from error
    return config


def _check_devices(devices: tuple[Gpu, ...]) -> None:
    """A device without a name, or named twice, is a slip of the caller: nobody would ever be kept off it."""
    seen: set[Gpu] = set()
    for position, device in enumerate(devices):
        where = f"config.hybrid_devices[{position}]"
        require_id(f"{where}.node", device.node)
        require_id(f"{where}.uuid", device.uuid)
        if device in seen:
            message = f"{device.uuid!r} of node {device.node!r} is named twice"
            raise invalid_argument(where, message, value=device.uuid, reason="DUPLICATE")
        seen.add(device)


_PROTO_NAMES = {
    "idle_tolerance_s": "idle_tolerance",
    "max_response_length": "max_response_tokens",
    "reinstall_within_step": "can_reinstall",
}
"""Fields that the policies know by another name than the contract."""


def refused(error: FieldError) -> TurnoutError:
    """What a policy's refusal of a value is to the caller."""
    name = _PROTO_NAMES.get(error.field, error.field)
    in_switch = name in SwitchConfig.__dataclass_fields__
    reason = "UNKNOWN_POLICY" if isinstance(error, UnknownPolicyError) else "INVALID_ARGUMENT"
    return invalid_argument(
        f"config.{'switch.' if in_switch else ''}{name}",
        f"{name} must be {error.requirement}, not {error.value!r}",
        value=error.value,
        reason=reason,
    )
