"""Both options of a step, looked at again with the lengths that came.

What finished in a step tells how long it would have taken without a lend and with one, whichever was done. Learned from
the option that was done alone, errors would be those of the steps that looked like it.

Invariant: both looks differ by lengths alone: engines, costs and training are those of the prediction.
"""

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.policies.jit.forecast import Forecast, Options, options
from services.scheduler.policies.jit.outlook import Setting, reached


@dataclass(slots=True)
class Replay:
    """What was predicted, of what, and `completions`: tokens that each group still needed when it was predicted, for
    those that finished since."""

    forecast: Forecast
    setting: Setting
    predicted: Options
    sampleable: int
    mini_batches: int
    sync_s: float
    x0: float
    alive: frozenset[str]
    completions: list[float] = field(default_factory=list)

    def finished(self, group: str, lengths: tuple[int, ...]) -> None:
        """A group finished."""
        flight = self.forecast.flight
        members = flight.members(group)
        if members is None:
            self.completions.append(float(max(lengths, default=0)))
        elif group in self.alive:
            left = [
                lengths[key.trajectory] - tokens
                for key, tokens in zip(flight.keys[members], flight.snapshot.tokens[members], strict=True)
                if 0 <= key.trajectory < len(lengths)
            ]
            self.completions.append(max(left, default=1.0))

    def options(self) -> Options:
        """The options, had these lengths been known."""
        completion = np.sort(np.array(self.completions))[:, None]
        needed = reached(completion, self.sampleable, self.setting.mini_batch, self.mini_batches, self.x0)
        return options(self.forecast, needed, self.setting, self.sync_s, self.x0)
