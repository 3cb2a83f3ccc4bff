"""Predicted against realised steps: what a lend's predicted gain is worth.

A step is predicted twice when the one before it ends, without and with a lend; one of the two comes true. When it ends,
its lengths are known, and with them both can be told again. So three errors are learned: of the gain, by lengths, from
every step, whatever was done; and of either option that came true, by all else. Their means correct the next predicted
gain, and a policy whose lends cost more than it believes stops lending.

Invariants: an error by lengths is learned from every step alike, since those that were not lent are those that looked
bad; a kind that never came true is not corrected; one step moves a correction by a stated share at most; a correction
that is not confirmed fades, so that a lend is tried again one day.
"""

# Steps that count as much as all before: a first error is not taken at its word.
_DOUBTS = 4.0
_KEEP = 0.93
# A gain has to exceed so many times the usual error, times that error's share of a step's training: where predictions
# miss by a few per cent of a step nearly every gain is taken, where they miss by a fifth only large ones are.
_CAUTION = 2.5
# The usual error, as a share of a step's training, until it is known.
_SCATTER = 0.1
# How much of a correction is left after a step of the other kind.
_FADE = 0.985
# One step says little: an error counts as this share of the step's training at most.
_OUTLIER = 0.3


class _Error:
    """Errors of one kind, in seconds; the mean is shrunk towards 0, the size towards a guess, while few are known."""

    def __init__(self) -> None:
        self.guess_scatter_s = 0.0
        self._sum = 0.0
        self._weight = 0.0
        self._sizes = 0.0

    @property
    def mean_s(self) -> float:
        return self._sum / (self._weight + _DOUBTS)

    @property
    def scatter_s(self) -> float:
        """Mean size of the errors."""
        return (self._sizes + _DOUBTS * self.guess_scatter_s) / (self._weight + _DOUBTS)

    def add(self, seconds: float) -> None:
        self._sizes = self._sizes * _KEEP + abs(seconds)
        self._sum = self._sum * _KEEP + seconds
        self._weight = self._weight * _KEEP + 1.0

    def fade(self) -> None:
        self._sum *= _FADE
        self._weight *= _FADE
        self._sizes *= _FADE


class Guard:
    """Feed it both predictions of a step, which came true, and when the step ended with what its lengths explain."""

    def __init__(self) -> None:
        self._alone, self._lent, self._gain = _Error(), _Error(), _Error()
        self._predicted: tuple[float, float] | None = None
        self._was_lent = False
        self._trained_s = 0.0
        self._train_s = 0.0
        self._since = 0.0

    @property
    def correction_s(self) -> float:
        """What is to be added to the predicted gain of a lend, in seconds."""
        return self._gain.mean_s + self._alone.mean_s - self._lent.mean_s

    @property
    def margin_s(self) -> float:
        """Seconds that a lend's predicted gain has to exceed, by what such predictions have missed by."""
        scatter_s = self._lent.scatter_s
        return _CAUTION * scatter_s * scatter_s / max(self._train_s, scatter_s, 1e-9)

    def predicted(self, at: float, alone_s: float, lent_s: float, train_s: float) -> None:
        """A step was predicted at `at`: it ends so much later without and with a lend, `train_s` of it training."""
        self._predicted = (alone_s - train_s, lent_s - train_s)
        self._train_s = train_s
        self._lent.guess_scatter_s = _SCATTER * train_s
        self._since = at
        self._was_lent = False
        self._trained_s = 0.0

    def lent(self) -> None:
        """The GPUs were lent for it."""
        self._was_lent = True

    def trained(self, seconds: float) -> None:
        """So much of it was training."""
        self._trained_s += seconds

    def forget_step(self) -> None:
        """Its prediction counts for nothing."""
        self._predicted = None

    def step_ended(self, at: float, alone_s: float, lent_s: float) -> None:
        """It ended. alone_s, lent_s: what would have been predicted of it, had its lengths been known."""
        if self._predicted is None:
            return
        alone_s, lent_s = alone_s - self._train_s, lent_s - self._train_s
        expected = self._predicted[0] - self._predicted[1]
        self._predicted = None
        limit = _OUTLIER * self._train_s
        self._gain.add(min(max(alone_s - lent_s - expected, -limit), limit))
        missed = at - self._since - self._trained_s - (lent_s if self._was_lent else alone_s)
        true, other = (self._lent, self._alone) if self._was_lent else (self._alone, self._lent)
        true.add(min(max(missed, -limit), limit))
        other.fade()
