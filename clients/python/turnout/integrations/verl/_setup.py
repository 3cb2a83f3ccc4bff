"""What verl's configuration says about Turnout: `trainer.v1.sampler.sampler_kwargs`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class VerlSetup:
    """The settings of one run, by their names in `sampler_kwargs`."""

    run_id: str
    """The run, an id of the user's choice; one that resumes keeps it."""
    buffer: str
    """gRPC target of the replay buffer, as trainer, agent loop workers and scheduler reach it."""
    engine: str = ""
    """gRPC target of the engine controller; needed by the trainer."""
    scheduler: str = ""
    """gRPC target of the switch scheduler; needed by the trainer."""
    policy: str = "verl"
    """Policy of the scheduler: `verl`, `jit`, `shadow:jit`, ..."""
    filter_groups_metric: str | None = None
    """What `algorithm.filter_groups.metric` says; verl does not tell a custom sampler."""
    poll_interval: float = 2.0
    """Seconds that a step may wait without counting as idle, as in verl. Nothing is polled."""
    balancer: str = "turnout-balancer"
    """Name of the actor through which the controller reaches verl's balancer (its `--verl-balancer`)."""
    take_over: bool = False
    """Whether to take over from a trainer of this run that gave a sign of life within the last minute."""
    look_interval: float = 30.0
    """Seconds between two comparisons with TransferQueue while a wait lasts."""

    @classmethod
    def read(cls, sampler_kwargs: Mapping[str, Any]) -> Self:
        """Read `sampler_kwargs`. Raises ValueError naming what is missing, unknown or out of range."""
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(sampler_kwargs) - set(known))
        if unknown:
            raise ValueError(f"sampler_kwargs has {unknown[0]!r}; known are {', '.join(known)}")
        for name, field in known.items():
            if field.default is MISSING and not sampler_kwargs.get(name):
                raise ValueError(f"sampler_kwargs.{name} is needed")
        setup = cls(**{str(name): value for name, value in sampler_kwargs.items()})
        for name in ("poll_interval", "look_interval"):
            if not 0 < getattr(setup, name) < math.inf:
                raise ValueError(f"sampler_kwargs.{name} must be a number above 0, not {getattr(setup, name)!r}")
        return setup

    def check_services(self) -> None:
        """Raise ValueError if a service that the trainer needs is not named."""
        for name in ("engine", "scheduler"):
            if not getattr(self, name):
                raise ValueError(f"sampler_kwargs.{name} is needed by the trainer")

    def check_filter(self, algorithm: Mapping[str, Any]) -> None:
        """Raise ValueError if `algorithm.filter_groups` wants another filter than this."""
        filtering = algorithm.get("filter_groups") or {}
        wanted = filtering.get("metric") if filtering.get("enable") else None
        if wanted != self.filter_groups_metric:
            raise ValueError(
                f"algorithm.filter_groups filters by {wanted!r} and sampler_kwargs.filter_groups_metric by "
                f"{self.filter_groups_metric!r}: say the same in both"
            )
