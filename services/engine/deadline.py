"""The time that an engine has.

Invariant: it is measured by the event loop's clock, in wall seconds, whatever the domain's time does.
"""

from __future__ import annotations

import asyncio


class Deadline:
    """A moment of the event loop's clock."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.restart()

    def restart(self) -> None:
        """Count from now again."""
        self._at = asyncio.get_running_loop().time() + self.timeout

    @property
    def left(self) -> float:
        """Wall seconds until then, 0 if it is past."""
        return max(0.0, self._at - asyncio.get_running_loop().time())
