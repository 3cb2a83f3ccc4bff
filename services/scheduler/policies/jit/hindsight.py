"""How predicted waits turned out.

A reclaim is decided at the moment when the rest looks near, so predictions made then are too hopeful on average,
however good the model is. Arrivals after a reclaim are therefore stretched by a factor that makes predicted and
realised waits agree on average; the same factor takes up whatever else the model gets wrong for long.

Invariants: one reclaim teaches once, when its step ends; the factor stays within stated bounds.
"""

from math import exp, log

# What the published setting teaches; a run begins with it.
_FIRST = 1.08
_LEAST, _MOST = 0.9, 1.5
# How far one step moves the logarithm, per share of the step's training time by which the wait was missed.
_RATE = 0.15
# One step says little: a miss counts as this share at most.
_OUTLIER = 0.25


class Hindsight:
    """`stretch`: by how much arrivals after a reclaim take longer than the model says."""

    def __init__(self) -> None:
        self._log = log(_FIRST)
        self._predicted_s: float | None = None
        self._train_s = 0.0
        self._waited_s = 0.0

    @property
    def stretch(self) -> float:
        """Realised over modelled time."""
        return exp(self._log)

    def predicted(self, wait_s: float, train_s: float) -> None:
        """GPUs were taken back: the step, which trains for `train_s`, is expected to wait `wait_s` from now on."""
        self._predicted_s = wait_s
        self._train_s = train_s
        self._waited_s = 0.0

    def waited(self, wait_s: float) -> None:
        """A mini-batch was waited for."""
        self._waited_s += wait_s

    def forget_step(self) -> None:
        """Its prediction counts for nothing."""
        self._predicted_s = None

    def step_ended(self) -> None:
        """Learn from the step."""
        if self._predicted_s is not None and self._train_s > 0:
            missed = (self._waited_s - self._predicted_s) / self._train_s
            moved = self._log + _RATE * min(max(missed, -_OUTLIER), _OUTLIER)
            self._log = min(max(moved, log(_LEAST)), log(_MOST))
        self._predicted_s = None
