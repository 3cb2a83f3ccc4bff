"""The requests inside the reference engine: those that are decoded, and those that are held back.

Invariants: every request has one stream, which ends once; held requests reach the decode clock only when scheduling
starts; tokens are attributed to the weights under which they were decoded.
"""

from __future__ import annotations

import asyncio
import math

from services.engine.domain.requests import Finish
from services.engine.reference.decode import Curve, DecodeClock, Gain
from services.engine.reference.streams import Stream
from services.runtime.clock import Clock, Timer
from services.runtime.errors import TurnoutError


class Batch:
    """Streams on top of a decode clock. `version` and `garbage` describe the weights that decode now."""

    def __init__(self, clock: Clock, curve: Curve, version: int, garbage: bool) -> None:
        self.streams: dict[str, Stream] = {}
        self.version = version
        self.garbage = garbage
        self._clock = clock
        # Times count from here, which keeps them small and sums of them exact.
        self._started = clock.now()
        self._decode = DecodeClock(curve)
        self._held: dict[str, Stream] = {}
        self._timer: Timer | None = None
        self._idle = asyncio.Event()

    @property
    def held(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    @property
    def active(self) -> int:
        """Requests that decode or are prefilled."""
        return len(self.streams) - len(self._held)

    def read(self) -> DecodeClock:
        """The decode clock, as of now."""
        self._handle(self._decode.advance(self._now()))
        return self._decode

    def add(self, stream: Stream, *, hold: bool) -> None:
        """A request has come."""
        self.streams[stream.request.request_id] = stream
        if hold:
            self._held[stream.request.request_id] = stream
        else:
            self._admit(stream)

    def end(self, request_id: str, finish: Finish) -> None:
        """End a request with its tokens so far; an unknown one is fine."""
        gains, tokens = self._decode.remove(request_id, self._now())
        self._handle(gains)
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            self._held.pop(request_id, None)
            stream.give(tokens, self.version, self.garbage, finish)
        self._reschedule()

    def abort_all(self) -> None:
        """End all requests, held ones too."""
        for request_id in list(self.streams):
            self.end(request_id, Finish.ABORT)

    def fail_all(self, error: TurnoutError) -> None:
        """The engine is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._decode.freeze(self._now())
        streams = list(self.streams.values())
        self.streams.clear()
        self._held.clear()
        self._idle.set()
        for stream in streams:
            stream.fail(error)

    def freeze(self) -> None:
        """Stop where everything is."""
        self._handle(self._decode.freeze(self._now()))
        self._reschedule()

    def recompute(self) -> None:
        """All KV is gone: every request is prefilled again."""
        self._handle(self._decode.recompute(self._now()))
        self._reschedule()

    def start(self) -> None:
        """Go on, with those that were held back too."""
        self._handle(self._decode.thaw(self._now()))
        held, self._held = self._held, {}
        for stream in held.values():
            self._admit(stream)
        self._reschedule()

    async def drained(self) -> None:
        """Wait until nothing but held requests is left."""
        while self.active:
            self._idle.clear()
            await self._idle.wait()

    def change_weights(self, version: int, garbage: bool) -> None:
        """What decodes from now on."""
        tokens = self.read().tokens()
        for key, stream in self.streams.items():
            stream.weights_changed(tokens.get(key, 0), self.version, self.garbage)
        self.version, self.garbage = version, garbage

    def _now(self) -> float:
        return self._clock.now() - self._started

    def _admit(self, stream: Stream) -> None:
        request = stream.request
        if not stream.wanted:
            self.end(request.request_id, Finish.STOP if stream.script.stopped else Finish.LENGTH)
            return
        context = len(request.prompt) + len(request.output)
        limits = (request.delta_tokens, request.delta_interval)
        self._handle(self._decode.add(request.request_id, context, stream.wanted, self._now(), *limits))
        self._reschedule()

    def _handle(self, gains: list[Gain]) -> None:
        for gain in gains:
            stream = self.streams.get(gain.key)
            if stream is None:
                continue
            finish = None
            if gain.done:
                finish = Finish.STOP if stream.script.stopped else Finish.LENGTH
                del self.streams[gain.key]
            stream.give(gain.tokens, self.version, self.garbage, finish)

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.active:
            self._idle.set()
        following = self._decode.next_time()
        if following != math.inf:
            self._timer = self._clock.call_at(self._started + following, self._turn)

    def _turn(self) -> None:
        self.read()
        self._reschedule()
