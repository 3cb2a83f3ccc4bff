"""What a fork leaves of the clients.

Invariants: a child never speaks on a connection of its parent, nor closes one: it forgets the inherited channels and
opens its own at its first call; where gRPC cannot be relied on in the child, a call fails at once with `Forked` instead
of hanging or crashing. The parent notices nothing.

What gRPC does, as seen with grpcio 1.71 to 1.85: a child of a process that is not inside of gRPC at the fork works.
While a call is at work, it works if GRPC_ENABLE_FORK_SUPPORT=1 was set before grpc was imported; if it was not, about
one child in 25 dies of a segmentation fault. With GRPC_ENABLE_FORK_SUPPORT=0 every child hangs. Its asyncio half never
works: the thread that polls for it stays behind, so that calls of the child never end, and now and then the child
crashes before it has made one.
"""

from __future__ import annotations

import os
from typing import Any, Final, Protocol
from weakref import WeakSet

_SUPPORT: Final = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").strip().lower()
"""Read when gRPC reads it: as it is imported."""

_ON: Final = frozenset({"1", "true", "yes"})
_ADVICE: Final = 'start the process with multiprocessing\'s "spawn" or "forkserver", or fork before the first call'


class Forked(RuntimeError):
    """The process was forked from one whose clients gRPC cannot follow here."""


class Link(Protocol):
    """What is told of a fork."""

    asynchronous: bool

    @property
    def is_open(self) -> bool:
        """Whether it has a channel."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a call is at work on it."""
        ...

    def forget(self) -> list[Any]:
        """Be as if nothing was opened yet; returns the channels it had."""
        ...


class _State:
    def __init__(self) -> None:
        self.links: WeakSet[Link] = WeakSet()
        self.any_opened = False
        # Why calls cannot work in this process, by kind of link.
        self.refusals: dict[bool, str] = {}
        # Kept for ever: letting go of a channel closes it, and that is said on the connection of the parent.
        self.inherited: list[Any] = []


_state: Final = _State()


def watch(link: Link) -> None:
    """Tell a link of forks as long as it lives."""
    _state.links.add(link)


def opening(link: Link) -> None:
    """A link is about to open a channel. Raises Forked if it could not be used."""
    refusal = _state.refusals.get(link.asynchronous)
    if refusal is not None:
        raise Forked(refusal)
    _state.any_opened = True


def _in_child() -> None:
    links = list(_state.links)
    if _state.any_opened and _SUPPORT and _SUPPORT not in _ON:
        _refuse(f"this process was forked after gRPC was used, and GRPC_ENABLE_FORK_SUPPORT is {_SUPPORT}: {_ADVICE}")
    elif _SUPPORT not in _ON and any(link.is_busy for link in links):
        _refuse(
            "this process was forked while a call of its parent was at work: set GRPC_ENABLE_FORK_SUPPORT=1 before "
            f"grpc is imported, {_ADVICE}"
        )
    if any(link.asynchronous and link.is_open for link in links):
        text = f"this process was forked while an asyncio client was open, which gRPC does not survive: {_ADVICE}"
        _state.refusals.setdefault(True, text)
    for link in links:
        _state.inherited += link.forget()


def _refuse(text: str) -> None:
    _state.refusals = {True: text, False: text}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
