"""Moment: the two times a change happens at.

Invariant: durations are measured on `now` alone; `wall` is only ever shown to people.
"""

from typing import NamedTuple


class Moment(NamedTuple):
    """When something happens: `now` in seconds of the monotonic domain clock, `wall` in unix seconds."""

    now: float
    wall: float
