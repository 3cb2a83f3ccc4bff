"""How far workers say their trajectories are, in the run's unit: tokens, frames, denoising steps.

It is what is known of a trajectory whose requests no engine shows. Invariant: what is kept of a trajectory goes when it
finishes or is issued again, and with its group.
"""

from __future__ import annotations

from collections.abc import Iterator


class Reports:
    """The newest report of each running trajectory of one run."""

    def __init__(self) -> None:
        self._done: dict[str, dict[int, int]] = {}

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Group, position in it, and units done."""
        for group, members in self._done.items():
            for index, done in members.items():
                yield group, index, done

    def told(self, group: str, index: int, done: int) -> None:
        """A worker reported."""
        self._done.setdefault(group, {})[index] = done

    def settle(self, group: str, index: int) -> None:
        """The trajectory finished."""
        members = self._done.get(group, {})
        members.pop(index, None)
        if not members:
            self.forget(group)

    def forget(self, group: str) -> None:
        """The group is finished or gone, or some of its trajectories run anew: who still runs reports again."""
        self._done.pop(group, None)
