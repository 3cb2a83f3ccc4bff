"""Calls from other threads to an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from services.runtime.discovery import Discovery
from services.runtime.loop_calls import call_on
from services.runtime.loop_collector import LoopCollector


class Depth(LoopCollector):
    def read(self) -> list[Metric]:
        return [GaugeMetricFamily("depth", "How deep.", value=3)]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Coroutines that nobody awaited warn when they are collected, and pytest would blame another test for it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert not [str(warning.message) for warning in caught]


def closed_loop() -> tuple[asyncio.AbstractEventLoop, Discovery, Depth]:
    async def make() -> tuple[Discovery, Depth]:
        return Discovery("buffer"), Depth()

    loop = asyncio.new_event_loop()
    made = loop.run_until_complete(make())
    loop.close()
    return loop, *made


def elsewhere(call: object) -> list[object]:
    """What comes of it on another thread."""
    came: list[object] = []

    def run() -> None:
        try:
            came.append(call())  # type: ignore[operator]
        except Exception as error:
            came.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return came


def test_metrics_asked_of_a_closed_loop_leave_no_coroutine_behind() -> None:
    """A scrape during the end of a service made coroutines that nobody awaited, and warned of them later."""
    _, discovery, depth = closed_loop()
    with nothing_left_behind():
        assert elsewhere(lambda: discovery.as_json("http://h:1")) == [RuntimeError]
        assert elsewhere(lambda: list(depth.collect())) == [[]]


def test_a_loop_that_stops_before_it_came_to_the_call_leaves_none_behind_either() -> None:
    loop = asyncio.new_event_loop()
    with nothing_left_behind():
        with pytest.raises(TimeoutError):
            call_on(loop, lambda: asyncio.sleep(0), 0.01)
        loop.close()


async def test_the_call_runs_on_the_loop_and_its_answer_and_error_come_back() -> None:
    loop = asyncio.get_running_loop()

    async def where() -> int:
        return threading.get_ident()

    async def broken() -> None:
        raise LookupError("no such thing")

    assert await asyncio.to_thread(call_on, loop, where, 5) == threading.get_ident()
    with pytest.raises(LookupError, match="no such thing"):
        await asyncio.to_thread(call_on, loop, broken, 5)


async def test_a_call_that_takes_too_long_is_cancelled() -> None:
    """A scrape that was given up must not go on asking peers."""
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.to_thread(call_on, asyncio.get_running_loop(), endless, 0.05)
    await ended.wait()


def test_a_loop_that_ends_during_the_call_ends_the_call() -> None:
    """A scrape would otherwise hold up the end of its service for as long as it may take."""
    came: list[object] = []

    async def main() -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        async def endless() -> None:
            begun.set()
            await asyncio.Event().wait()

        thread.append(threading.Thread(target=lambda: came.extend(elsewhere(lambda: call_on(loop, endless, 50)))))
        thread[0].start()
        await begun.wait()

    thread: list[threading.Thread] = []
    asyncio.run(main())
    thread[0].join()
    assert came == [RuntimeError]
