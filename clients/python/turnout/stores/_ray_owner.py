"""The process that owns payloads in Ray's object store.

Invariants: an object lives exactly as long as its owner holds the reference; the owner made the object, so nothing is
lost with the process that brought the bytes.
"""

from __future__ import annotations

from typing import Any


class PayloadOwner:
    """Holds objects by key. It runs as a detached actor, one on each node that payloads are put from."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}

    def put(self, key: str, data: Any) -> None:
        """Keep a one-dimensional uint8 array under a new key."""
        import ray

        # Not the object that came: that one belongs to the caller, and would go with it.
        self._refs[key] = ray.put(data)

    def find(self, keys: list[str]) -> list[Any]:
        """Return the references of keys, None for those that are not there."""
        return [self._refs.get(key) for key in keys]

    def delete(self, keys: list[str]) -> None:
        """Let objects go; readers that have one keep it until they are done."""
        for key in keys:
            self._refs.pop(key, None)

    def count(self) -> int:
        """Return how many objects it holds."""
        return len(self._refs)
