"""A set of children that live and die together.

Invariants: leaving the fleet ends every child, in the reverse order of their starts, whatever happened; while work is
run in it, a child that ends on its own ends the work with `ChildFailed`; no child is waited for twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from services.processes.child import Child, ChildFailed, ChildSpec, OnLine

T = TypeVar("T")

READY_WITHIN_S: Final = 60.0
"""Importing gRPC and numpy takes seconds on a busy machine, not a minute."""

GRACE_S: Final = 15.0
"""A little more than the grace a service gives its own calls."""


class Fleet:
    """Children started with `start`; an async context manager."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._children: list[Child] = []
        self._finished: set[Child] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: a second Ctrl-C must not leave children behind.
        stopping = asyncio.ensure_future(self.stop())
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                continue

    @property
    def children(self) -> list[Child]:
        """All children, in the order of their starts."""
        return list(self._children)

    async def start(
        self,
        spec: ChildSpec,
        *,
        on_line: OnLine | None = None,
        on_error_line: OnLine | None = None,
        ready_within_s: float = READY_WITHIN_S,
    ) -> Child:
        """Start a child and wait until it is ready; raises ChildFailed."""
        child = await Child.start(spec, on_line=on_line, on_error_line=on_error_line)
        self._children.append(child)
        self._changed.set()
        await child.ready(ready_within_s)
        return child

    async def start_all(self, *specs: ChildSpec, on_error_line: OnLine | None = None) -> list[Child]:
        """Start several at once; raises the first ChildFailed once all have been started."""
        starts = [asyncio.create_task(self.start(spec, on_error_line=on_error_line)) for spec in specs]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise

    async def finish(self, child: Child) -> int:
        """Wait for a child that is meant to end on its own, and return its exit code."""
        self._finished.add(child)
        self._changed.set()
        return await asyncio.shield(child.ended)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, unless a child ends first: then cancel it and raise ChildFailed."""
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._first_failure())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise watch.result()
        finally:
            for pending in (task, watch):
                pending.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def stop(self) -> None:
        """End every child, the youngest first; those started later depend on the earlier ones."""
        while self._children:
            await self._children.pop().stop(self._grace_s)

    async def _first_failure(self) -> ChildFailed:
        while True:
            self._changed.clear()
            watched = {child.ended: child for child in self._children if child not in self._finished}
            for ended, child in watched.items():
                if ended.done():
                    return child.failure()
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({changed, *watched}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
