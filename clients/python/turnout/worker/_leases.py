"""The claims a worker holds, and keeping them.

Invariants: a claim is renewed while any of its trajectories is unsettled and never after; when the buffer says that a
claim is lost, the work on it is cancelled and nothing more is reported for it; what is on its way already may be what
ended the claim, and has until the next renewal to be answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, TurnoutError, item_error, seconds

_log = logging.getLogger("turnout")

_SHARE: Final = 1 / 3
"""Two renewals in a row may be lost before a claim is."""

_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 60.0


@dataclass(slots=True)
class Held:
    """One claim and the work on it."""

    token: buffer_pb2.ClaimToken
    lease_s: float
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    lost: bool = False
    doubted: bool = False
    """The buffer said once that it is lost, while something was on its way."""


class Leases:
    """All claims of a worker; `run` is the loop that renews them."""

    def __init__(
        self, buffer: AsyncBufferClient, *, run_id: str, is_settling: Callable[[asyncio.Task[None]], bool]
    ) -> None:
        """`is_settling` tells whether what a task produced is on its way."""
        self._is_settling = is_settling
        self._buffer = buffer
        self._run_id = run_id
        self._held: dict[str, Held] = {}
        self._changed = asyncio.Event()

    @property
    def held(self) -> list[Held]:
        """The claims."""
        return list(self._held.values())

    def hold(self, claim: buffer_pb2.Claim) -> Held:
        """Begin to renew a claim."""
        held = Held(claim.token, seconds(claim.lease))
        self._held[claim.token.claim_id] = held
        self._changed.set()
        return held

    def settle(self, held: Held, index: int) -> None:
        """A trajectory of the claim is off our hands; the last one ends the renewals."""
        held.tasks.pop(index, None)
        if not held.tasks:
            self._held.pop(held.token.claim_id, None)

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            while not self._held:
                self._changed.clear()
                await self._changed.wait()
            shortest = min(held.lease_s for held in self._held.values())
            await asyncio.sleep(min(max(shortest * _SHARE, _SHORTEST_S), _LONGEST_S))
            await self._renew(self.held)

    async def _renew(self, claims: list[Held]) -> None:
        if not claims:
            return
        request = buffer_pb2.RenewClaimsRequest(run_id=self._run_id, tokens=[held.token for held in claims])
        try:
            response = await self._buffer.calls.RenewClaims(request)
        except TurnoutError as error:
            _log.warning("claims were not renewed: %s", error)
            return
        for held, outcome in zip(claims, response.outcomes, strict=True):
            error_of_item = item_error(outcome)
            if error_of_item is None:
                continue
            lost = [task for task in held.tasks.values() if held.doubted or not self._is_settling(task)]
            held.doubted = True
            if lost:
                _log.warning("claim %s is lost: %s", held.token.claim_id, error_of_item)
                held.lost = True
                for task in lost:
                    task.cancel()
