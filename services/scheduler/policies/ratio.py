"""The threshold ratio that moves with idle and calm steps.

Invariants: one step moves the ratio at most once; a step up never passes 1, a step down never ends below one mini-batch
share; the counters saturate and are cleared only by a step of the other kind.
"""

from services.scheduler.policies.types import PolicyConfig


class AdaptiveRatio:
    """`value` is the ratio in force. Source of the rule: verl 0.9.1, _adapt_switch_threshold."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._idle_steps = 0
        self._calm_steps = 0
        self.value = config.switch.switch_threshold_ratio

    def adopt(self, config: PolicyConfig) -> None:
        """Use `config` from now on. The learned value stays unless the configured ratio itself changed."""
        if config.switch.switch_threshold_ratio != self._config.switch.switch_threshold_ratio:
            self.value = config.switch.switch_threshold_ratio
        self._config = config

    def step_ended(self, idle: bool) -> None:
        """Count one step, and move the ratio if enough of its kind came in a row. Does nothing when not adaptive."""
        switch = self._config.switch
        if not switch.adaptive_switch_threshold:
            return
        release = switch.switch_threshold_release_steps
        if idle:
            self._calm_steps = 0
            self._idle_steps = min(self._idle_steps + 1, release)
            if self._idle_steps == release:
                self.value = min(1.0, self.value + switch.switch_threshold_step_up)
        else:
            self._idle_steps = 0
            self._calm_steps = min(self._calm_steps + 1, release)
            if self._calm_steps == release:
                share = 1.0 / self._config.run.parameter_sync_step
                self.value = max(share, self.value - switch.switch_threshold_step_down)
