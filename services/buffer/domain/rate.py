"""RequestRate: how often a run may ask, as a token bucket.

Invariants: in any t seconds at most rate x t + max(1, rate) requests pass; one that is refused takes nothing. Time is
passed in, in monotonic wall seconds: requests cost the machine, whose time no job can scale.
"""


class RequestRate:
    """The requests of one run."""

    __slots__ = ("_asked", "_at", "_second", "_taken")

    def __init__(self) -> None:
        self._taken = 0.0
        self._at = 0.0
        self._second = 0
        self._asked = 0

    @property
    def asked(self) -> int:
        """Requests in the present second, refused ones included."""
        return self._asked

    def ask(self, rate: float, now: float) -> float:
        """Let one request pass at `rate` per second and return 0, or return the seconds until one could."""
        second = int(now)
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        burst = max(1.0, rate)
        # What flows back while nobody asks; a clock that stood still gives nothing.
        self._taken = max(0.0, self._taken - max(0.0, now - self._at) * rate)
        self._at = max(self._at, now)
        if self._taken + 1.0 > burst + 1e-9:
            return (self._taken + 1.0 - burst) / rate
        self._taken += 1.0
        return 0.0
