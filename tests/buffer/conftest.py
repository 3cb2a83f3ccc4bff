"""A running buffer, on the real clock and on one that tests advance."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.runtime.clock import ManualClock
from tests.buffer.helpers import Buffer, Caller, checked_buffer


@pytest.fixture
async def buffer() -> AsyncIterator[Buffer]:
    async with checked_buffer() as running:
        yield running


@pytest.fixture
def caller(buffer: Buffer) -> Caller:
    return buffer.caller()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def timed(clock: ManualClock) -> AsyncIterator[Buffer]:
    """A buffer whose domain time stands still until the test advances `clock`."""
    async with checked_buffer(clock) as running:
        yield running
