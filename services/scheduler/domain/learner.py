"""What a run's policy has learned, and how it learns.

Invariants: the policy sees the run's events in their order, whether they happen now or are read back; a change of the
policy's name begins a new one, which is taught everything that is still known; copies share nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.events import Happening, RunEvent
from services.scheduler.domain.feed import PolicyFeed
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import Decision, Point


class Learner:
    """The policy of one run with the feed that translates events for it. `config` names the policy."""

    def __init__(self, config: RunConfig, create: PolicyFactory) -> None:
        self._create = create
        self.policy: Policy = create(config.policy, config.policy_config)
        self.feed = PolicyFeed(config.policy_config)

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    def adopt(self, config: RunConfig, past: Iterable[RunEvent]) -> None:
        """Go on under `config`. A policy of another name learns from `past` what the one before knew."""
        if config.policy == self.name:
            self.feed.config = config.policy_config
            return
        self.policy = self._create(config.policy, config.policy_config)
        self.feed = PolicyFeed(config.policy_config)
        for placed in past:
            self.observe(placed.event, placed.at)

    def observe(self, event: Happening, at: float) -> None:
        """Show `event`, which happened at run time `at`."""
        for seen in self.feed.read(event, at):
            self.policy.observe(seen)

    def decide(self, point: Point, at: float) -> Decision:
        """Ask the policy at run time `at`."""
        return self.policy.decide(point, at)

    def knowledge(self) -> tuple[Policy, PolicyFeed]:
        """A copy of all that it knows."""
        return copy.deepcopy((self.policy, self.feed))

    def recall(self, policy: Policy, feed: PolicyFeed, config: RunConfig) -> None:
        """Know what a copy knew, under `config`."""
        self.policy, self.feed = copy.deepcopy((policy, feed))
        self.feed.config = config.policy_config
