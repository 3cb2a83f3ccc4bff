"""How long the trainer waited, and for how many groups.

Invariants: a step's waits start at zero; the lifetime sums grow by a step only if it both missed groups and waited, so
a wait without a miss (or the reverse) never bends the time per group.
"""

from dataclasses import dataclass

from services.scheduler.policies.checks import check_not_negative


@dataclass(frozen=True, slots=True)
class StepWaits:
    """One step: seconds waited, and groups missing when its mini-batches were asked for."""

    wait_s: float = 0.0
    missing: int = 0


class WaitMeter:
    """Waits of the open step and of the run. Source: verl 0.9.1, on_sample_begin, on_sample_end and on_step_end."""

    def __init__(self) -> None:
        self._step = StepWaits()
        self._wait_s = 0.0
        self._missing = 0

    def begin_step(self) -> None:
        """Forget the waits of a step that did not end."""
        self._step = StepWaits()

    def asked(self, mini_batch_size: int, sampleable: int) -> None:
        """A mini-batch was asked for while `sampleable` groups existed."""
        missing = max(0, mini_batch_size - sampleable)
        self._step = StepWaits(self._step.wait_s, self._step.missing + missing)

    def waited(self, wait_s: float) -> None:
        """It came after `wait_s` seconds. Raises FieldError if that is negative or not finite."""
        check_not_negative("wait_s", wait_s)
        self._step = StepWaits(self._step.wait_s + wait_s, self._step.missing)

    def end_step(self) -> StepWaits:
        """Add the step to the lifetime sums and return it."""
        if self._step.missing > 0 and self._step.wait_s > 0:
            self._wait_s += self._step.wait_s
            self._missing += self._step.missing
        return self._step

    def seconds_per_group(self) -> float | None:
        """Lifetime wait per missing group, None before the first step that had both."""
        return self._wait_s / self._missing if self._missing else None
