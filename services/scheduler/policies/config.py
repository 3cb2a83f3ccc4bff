"""What a policy is told about the run before it starts.

Invariants: a configuration that exists is valid, whatever `enable_switch` says (a nonsense value is refused also while
switching is off); `train_batch_size` is a whole number of mini-batches, so no rounding hides in `parameter_sync_step`.
"""

from dataclasses import dataclass

from services.scheduler.policies.checks import check_finite, check_flag, check_not_negative, check_whole
from services.scheduler.policies.errors import IncompatibleError, OutOfRangeError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The shape of the run. Raises FieldError, naming field and value.

    train_batch_size: groups trained per step.
    mini_batch_size: groups per optimiser step; divides train_batch_size.
    total_training_steps: the last step of the run; nothing is lent at its end.
    hybrid_gpus, standalone_gpus: GPUs of the two pools; 0 is allowed where nothing needs them.
    idle_tolerance_s: a step whose waits add up to more than this many seconds was idle. 2 s is the interval at which
        verl polls its buffer, so no shorter wait shows there.
    group_size: trajectories per group by default.
    max_response_length: length cap in tokens, None when unknown.
    reinstall_within_step: the trainer can install the last published weights, so lending within a step is possible.
    """

    train_batch_size: int
    mini_batch_size: int
    total_training_steps: int
    hybrid_gpus: int
    standalone_gpus: int
    idle_tolerance_s: float = 2.0
    group_size: int = 1
    max_response_length: int | None = None
    reinstall_within_step: bool = False

    def __post_init__(self) -> None:
        check_whole("train_batch_size", self.train_batch_size, 1)
        check_whole("mini_batch_size", self.mini_batch_size, 1)
        if self.train_batch_size % self.mini_batch_size:
            raise IncompatibleError(
                "mini_batch_size", self.mini_batch_size, f"a divisor of train_batch_size {self.train_batch_size}"
            )
        check_whole("total_training_steps", self.total_training_steps, 1)
        check_whole("hybrid_gpus", self.hybrid_gpus, 0)
        check_whole("standalone_gpus", self.standalone_gpus, 0)
        check_not_negative("idle_tolerance_s", self.idle_tolerance_s)
        check_whole("group_size", self.group_size, 1)
        if self.max_response_length is not None:
            check_whole("max_response_length", self.max_response_length, 1)
        check_flag("reinstall_within_step", self.reinstall_within_step)

    @property
    def parameter_sync_step(self) -> int:
        """Mini-batches per step."""
        return self.train_batch_size // self.mini_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchConfig:
    """When GPUs move. Names and defaults are those of verl 0.9.1, HybridRolloutSwitchConfig. Raises FieldError.

    enable_switch: false makes every policy behave as `off`.
    switch_threshold_ratio: share of the batch that must be sampleable before a reclaim, in (0, 1].
    adaptive_switch_threshold: let `verl` move the ratio with idle and calm steps.
    switch_threshold_step_up, switch_threshold_step_down: how far one step moves the ratio, at least 0.
    switch_threshold_release_steps: idle (or calm) steps in a row before the ratio moves, at least 1.
    switch_cost_window_size: how many of the last lend and of the last reclaim costs are averaged, at least 1.
    """

    enable_switch: bool = False
    switch_threshold_ratio: float = 0.4
    adaptive_switch_threshold: bool = True
    switch_threshold_step_up: float = 0.05
    switch_threshold_step_down: float = 0.03
    switch_threshold_release_steps: int = 2
    switch_cost_window_size: int = 3

    def __post_init__(self) -> None:
        check_flag("enable_switch", self.enable_switch)
        check_finite("switch_threshold_ratio", self.switch_threshold_ratio)
        if not 0 < self.switch_threshold_ratio <= 1:
            raise OutOfRangeError("switch_threshold_ratio", self.switch_threshold_ratio, "in (0, 1]")
        check_flag("adaptive_switch_threshold", self.adaptive_switch_threshold)
        check_not_negative("switch_threshold_step_up", self.switch_threshold_step_up)
        check_not_negative("switch_threshold_step_down", self.switch_threshold_step_down)
        check_whole("switch_threshold_release_steps", self.switch_threshold_release_steps, 1)
        check_whole("switch_cost_window_size", self.switch_cost_window_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """All a policy is configured with. Raises IncompatibleError where run and switch do not go together."""

    run: RunConfig
    switch: SwitchConfig

    def __post_init__(self) -> None:
        # Without standalone GPUs nothing generates while the trainer trains, and the gain of lending has no meaning.
        if self.switch.enable_switch and self.run.standalone_gpus == 0:
            raise IncompatibleError("standalone_gpus", 0, "at least 1 while enable_switch is true")
