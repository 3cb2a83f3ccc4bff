"""What moving the GPUs costs, learned from the last moves.

Invariants: a window holds the last `size` costs of one direction and nothing else, so a huge first (cold) cost leaves
it; time alone never empties it, and its age is visible; the two directions never mix.
"""

from collections import deque

from services.scheduler.policies.checks import check_not_negative


class CostWindow:
    """Costs of one direction, in seconds."""

    def __init__(self, size: int) -> None:
        self._costs: deque[float] = deque(maxlen=size)
        self._newest_at = 0.0

    def add(self, cost_s: float, at: float) -> None:
        """Record a cost measured at time `at`. Raises FieldError if it is negative or not finite."""
        check_not_negative("cost_s", cost_s)
        self._costs.append(cost_s)
        self._newest_at = at

    def resize(self, size: int) -> None:
        """Keep the last `size` costs from now on."""
        self._costs = deque(self._costs, maxlen=size)

    def mean(self) -> float | None:
        """Mean cost in seconds, None before the first."""
        return sum(self._costs) / len(self._costs) if self._costs else None

    def age(self, now: float) -> float | None:
        """Seconds since the newest cost, None before the first."""
        return now - self._newest_at if self._costs else None


class SwitchCosts:
    """Both directions. Source: verl 0.9.1, _effective_switch_cost."""

    def __init__(self, size: int) -> None:
        self.lend = CostWindow(size)
        self.reclaim = CostWindow(size)

    def resize(self, size: int) -> None:
        """Keep the last `size` costs of each direction from now on."""
        self.lend.resize(size)
        self.reclaim.resize(size)

    def round_trip(self) -> float | None:
        """Mean lend cost + mean reclaim cost in seconds, None until both directions were measured."""
        lend, reclaim = self.lend.mean(), self.reclaim.mean()
        return None if lend is None or reclaim is None else lend + reclaim

    def numbers(self, now: float) -> dict[str, float]:
        """What is known, by name: mean and age in seconds of each direction."""
        known = {
            "lend_cost_seconds": self.lend.mean(),
            "lend_cost_age_seconds": self.lend.age(now),
            "reclaim_cost_seconds": self.reclaim.mean(),
            "reclaim_cost_age_seconds": self.reclaim.age(now),
        }
        return {name: value for name, value in known.items() if value is not None}
