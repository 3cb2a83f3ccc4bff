"""In which pool requests go on while GPUs are lent, as the policy that lends wants it.

Invariant: a wish holds from the begin of the lend it came with until its replicas are taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.engine.domain.requests import JoinKey
from services.engine.domain.spec import Role

Member = tuple[str, str, int]
"""Partition, group and trajectory: whatever the attempt is, the prefix is the same."""


def member_of(key: JoinKey) -> Member:
    """The member of a group that a request belongs to."""
    return key.partition, key.group_id, key.trajectory


class Wishes:
    """The wishes that hold."""

    def __init__(self) -> None:
        self._roles: Mapping[Member, Role] = {}

    def begin(self, hybrid: Iterable[JoinKey], standalone: Iterable[JoinKey]) -> None:
        """A lend begins: these are wanted on hybrid, those on standalone replicas."""
        self._roles = {
            **{member_of(key): Role.HYBRID for key in hybrid},
            **{member_of(key): Role.STANDALONE for key in standalone},
        }

    def clear(self) -> None:
        """Nothing is lent any more."""
        self._roles = {}

    def role(self, key: JoinKey | None) -> Role | None:
        """The pool that a request is wanted in, None where nothing is wished."""
        return self._roles.get(member_of(key)) if key is not None and self._roles else None
