"""Policies: when a run's hybrid GPUs move.

Invariants: importing this package loads neither gRPC nor protobuf, so any process may; a policy is known by one name,
and `shadow:` before a name makes it watch while verl acts.
"""

from collections.abc import Callable

from services.scheduler.policies.base import Policy
from services.scheduler.policies.errors import (
    EventOrderError,
    FieldError,
    IncompatibleError,
    NotFiniteError,
    OutOfRangeError,
    UnknownPolicyError,
)
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.jit import JitPolicy
from services.scheduler.policies.metrics import decision_metrics
from services.scheduler.policies.off import OffPolicy
from services.scheduler.policies.shadow import PREFIX, ShadowPolicy, switching
from services.scheduler.policies.types import PolicyConfig
from services.scheduler.policies.verl import VerlPolicy

__all__ = [
    "EventOrderError",
    "FieldError",
    "IncompatibleError",
    "NotFiniteError",
    "OutOfRangeError",
    "Policy",
    "PolicyConfig",
    "UnknownPolicyError",
    "create",
    "decision_metrics",
    "names",
]

_POLICIES: dict[str, Callable[[PolicyConfig], Policy]] = {
    policy.name: policy for policy in (OffPolicy, FixedPolicy, VerlPolicy, JitPolicy)
}


def names() -> tuple[str, ...]:
    """The policies that exist, in the order they are explained in the documentation."""
    return tuple(_POLICIES)


def create(name: str, config: PolicyConfig) -> Policy:
    """A new policy called `name`, with nothing observed. Raises UnknownPolicyError, which lists the names."""
    watched = name.removeprefix(PREFIX)
    if watched not in _POLICIES:
        raise UnknownPolicyError("policy", name, f"one of {', '.join(_POLICIES)}, or {PREFIX} and one of them")
    if name == watched:
        return _POLICIES[name](config)
    return ShadowPolicy(config, _POLICIES[watched](switching(config)))
