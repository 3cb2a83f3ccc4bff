"""What workers and trainers share: how they call, and what they tell the harness.

Invariants: a call is repeated, under one request id, until its answer is known; an error that no fault explains is
told as `wrong`, and fails the soak. Lines on stdout are JSON objects: `ok` is the time of a success, at most four a
second; `wrong` says what must not happen.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from turnout.client import (
    ClientOptions,
    DeadlineExceeded,
    ResourceExhausted,
    Timeouts,
    TurnoutError,
    Unavailable,
)

OPTIONS: Final = ClientOptions(timeouts=Timeouts(call=20.0, attempt=6.0, transition=60.0, transfer=60.0, outage=45.0))
"""Shorter than the client's own, so that a soak of minutes sees calls give up; keepalive and retries are the shipped
ones."""

PAUSE_S: Final = 0.3
"""Before a call is repeated that gave up, or found the disk full."""

_TOLD_EVERY_S: Final = 0.25


class Wrong(Exception):
    """Something that must not happen."""


def is_outage(error: TurnoutError) -> bool:
    """Whether the answer was lost, or the disk is full: the call is to be repeated."""
    return isinstance(error, Unavailable | DeadlineExceeded) or is_full(error)


def is_full(error: TurnoutError) -> bool:
    """Whether the disk of the buffer is full."""
    return isinstance(error, ResourceExhausted) and error.reason == "DISK_FULL"


class Errand:
    """One life of a worker or trainer: its name, its randomness and its line to the harness."""

    def __init__(self, name: str, directory: Path, seed: str) -> None:
        self.name = name
        self.directory = directory
        self.rng = random.Random(seed)
        self._told_at = 0.0
        self._wrongs = 0

    @property
    def draining(self) -> bool:
        """Whether the harness wants an end."""
        return (self.directory / "drain").exists()

    def ok(self) -> None:
        """Something succeeded."""
        now = time.monotonic()
        if now >= self._told_at + _TOLD_EVERY_S:
            self._told_at = now
            self._tell(ok=now)

    def wrong(self, what: str) -> None:
        """Tell what must not happen. A fault that repeats is not told for ever."""
        self._wrongs += 1
        if self._wrongs <= 20:
            self._tell(wrong=f"{self.name}: {what}")

    def check(self, holds: bool, what: Callable[[], str] | str) -> None:
        """Tell `what` unless it holds."""
        if not holds:
            self.wrong(what if isinstance(what, str) else what())

    @staticmethod
    def _tell(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)
