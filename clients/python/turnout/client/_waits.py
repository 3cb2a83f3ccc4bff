"""Waits and watches that outlive restarts, torn streams and proxies.

Invariants: a wait ends with its final event, with max_wait, or with an error of the service; being cut off is none of
these. Every arming carries the time that is left, the caller's own cursor and the same request id, so that nothing is
lost or counted twice. A wait whose service is away for `Timeouts.outage` ends with the last error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from turnout.buffer.v1 import buffer_pb2
from turnout.client._calls import CallPolicy, Messages
from turnout.client._errors import TurnoutError, is_retryable, stream_ended
from turnout.client._link import StreamCut
from turnout.client._retry import Outage

_LONGEST_ARMING_S: Final = 3600.0
"""A wait without an end is armed again each hour, so that no call is without a deadline."""

_ENDED_S: Final = 0.2
"""Services answer TIMED_OUT 0.1 s before the deadline; with less than this left, the time is over."""


ProgressFn = Callable[[buffer_pb2.WaitProgress], Awaitable[None] | None]
"""Called with every PROGRESS event of a wait."""

UNFINISHED: Final = (buffer_pb2.WAIT_OUTCOME_TIMED_OUT, buffer_pb2.WAIT_OUTCOME_HELD)
"""Outcomes that say no more than that the time of an arming is over."""


@dataclass(frozen=True, slots=True)
class Arming:
    """What one arming of a wait is to ask for."""

    max_wait: float
    """Seconds left."""
    number: int
    """How many armings ended TIMED_OUT before it."""


Arm = Callable[[Arming], Any]
"""Makes the request of an arming."""


class Meanwhile(Protocol):
    """What else a caller may have to do while it waits: it is done between two armings, on the waiting thread."""

    async def attend(self) -> float | None:
        """Do what is due, before each arming. Returns the seconds after which it wants to be asked again at the latest.

        None: not before it cuts the wait. What it raises ends the wait.
        """
        ...

    def listen(self, cut: Callable[[], None] | None) -> None:
        """`cut` ends the arming that has begun, from any thread, so that `attend` is awaited; None: it has ended."""
        ...


async def hold(
    policy: CallPolicy,
    call: Callable[..., Messages],
    arm: Arm,
    *,
    max_wait: float | None,
    again: Callable[[Any], bool],
    on_event: Callable[[str, Any], Awaitable[None]],
    meanwhile: Meanwhile | None = None,
) -> Any:
    """Wait until the final event, and return it. `max_wait` in seconds; None: as long as it takes.

    `again(done)` tells whether a final event only ended this arming: the service's own limit came before ours.
    `on_event(name, message)` is awaited for every event before it. What it raises ends the wait.
    """
    link, times = policy.link, policy.options.timeouts
    end = None if max_wait is None else link.now() + max_wait
    outage = Outage(policy.options.retry, policy.rng, now=link.now(), limit=times.outage)
    number = 0
    while True:
        asks_after = None if meanwhile is None else await meanwhile.attend()
        left = _LONGEST_ARMING_S if end is None else max(0.0, end - link.now())
        if asks_after is not None:
            left = min(left, asks_after)
        outage.began(link.now())
        try:
            messages = call(arm(Arming(left, number)), timeout=left + times.grace)
            if meanwhile is not None:
                meanwhile.listen(messages.cut)
            try:
                done = await _final(messages, on_event, lambda: outage.heard(link.now()))
            finally:
                if meanwhile is not None:
                    meanwhile.listen(None)
            if not again(done) or (end is not None and end - link.now() <= _ENDED_S):
                return done
            number += 1
            if asks_after is not None:
                continue
            pause = outage.pause(link.now())
        except StreamCut:
            continue
        except TurnoutError as error:
            pause = outage.pause(link.now(), error.retry_after) if is_retryable(error) else None
            if pause is None or (end is not None and link.now() + pause >= end):
                raise
        if pause is not None:
            await link.sleep(pause)


async def _final(messages: Messages, on_event: Callable[[str, Any], Awaitable[None]], heard: Callable[[], None]) -> Any:
    try:
        async for message in messages:
            heard()
            name = message.WhichOneof("event")
            if name == "done":
                return message.done
            if name is not None:
                await on_event(name, getattr(message, name))
    finally:
        messages.cancel()
    raise stream_ended("the stream ended without its final event")


async def follow(
    policy: CallPolicy, call: Callable[..., Messages], arm: Callable[[], Any]
) -> AsyncGenerator[Any, None]:
    """Yield the messages of a watch, armed again whenever it is torn, until the service ends it in order.

    `arm()` makes the request that goes on after the last message.
    """
    link = policy.link
    outage = Outage(policy.options.retry, policy.rng, now=link.now(), limit=policy.options.timeouts.outage)
    while True:
        outage.began(link.now())
        messages = call(arm())
        try:
            async for message in messages:
                outage.heard(link.now())
                yield message
            return
        except TurnoutError as error:
            pause = outage.pause(link.now(), error.retry_after) if is_retryable(error) else None
            if pause is None:
                raise
        finally:
            messages.cancel()
        await link.sleep(pause)
