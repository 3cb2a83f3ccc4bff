"""One reading of everything that runs.

Invariants: one call per engine and reading, all at the same time; an engine that does not answer is left out and
lowers the covered share, it never delays the report beyond the time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.engine.backends.base import EngineProgress, ForeignRequest
from services.engine.domain.requests import JoinKey
from services.engine.domain.spec import Health, Role
from services.engine.fleet import Fleet
from services.engine.generation import Generations, Live
from services.engine.slot import Slot
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError

READ_TIMEOUT_S: Final = 2.0
"""Wall seconds: reports come every 2 to 10 seconds, and a late one is worth little."""


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far one request is; `replica_id` is empty if it is parked."""

    join_key: JoinKey | None
    engine_request_id: str
    replica_id: str
    role: Role | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What one replica has done. `delivered_tokens` have come to their requests; None if none ran there."""

    role: Role
    engine: EngineProgress
    delivered_tokens: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """A reading at domain time `at`. `counters` are by replica, of those that answered."""

    at: float
    requests: tuple[RequestProgress, ...]
    counters: Mapping[str, Counters]
    covered_share: float


class ProgressReader:
    """Makes reports."""

    def __init__(self, fleet: Fleet, generations: Generations, clock: Clock) -> None:
        self._fleet = fleet
        self._generations = generations
        self._clock = clock

    async def read(self) -> Report:
        """Read now."""
        slots = [slot for slot in self._fleet.all if slot.replica.health is Health.HEALTHY]
        read = await asyncio.gather(*(self._read_one(slot) for slot in slots))
        answers = {slot.replica_id: answer for slot, answer in zip(slots, read, strict=True) if answer is not None}
        requests = tuple(self._request(live, answers) for live in list(self._generations.live))
        for slot in slots:
            if slot.replica_id in answers:
                requests += tuple(self._foreign(slot, each) for each in answers[slot.replica_id].foreign)
        in_engines = sum(answer.running + answer.waiting for answer in answers.values())
        covered = sum(
            request.engine_request_id in answers[request.replica_id].output_tokens
            for request in requests
            if request.replica_id in answers
        ) + sum(len(answer.foreign) for answer in answers.values())
        return Report(
            self._clock.now(),
            requests,
            {
                slot.replica_id: Counters(slot.replica.spec.role, answers[slot.replica_id], slot.kept_tokens)
                for slot in slots
                if slot.replica_id in answers
            },
            1.0 if not in_engines else min(1.0, covered / in_engines),
        )

    @staticmethod
    async def _read_one(slot: Slot) -> EngineProgress | None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await slot.backend.progress()
        except (TurnoutError, TimeoutError):
            return None

    @staticmethod
    def _foreign(slot: Slot, request: ForeignRequest) -> RequestProgress:
        return RequestProgress(
            request.join_key,
            request.request_id,
            slot.replica_id,
            slot.replica.spec.role,
            request.prompt_tokens,
            request.output_tokens,
        )

    @staticmethod
    def _request(live: Live, answers: Mapping[str, EngineProgress]) -> RequestProgress:
        forwarded = live.slot is not None and bool(live.engine_id)
        slot = live.slot if forwarded else None
        replica_id = slot.replica_id if slot else ""
        known = answers[replica_id].output_tokens if replica_id in answers else {}
        return RequestProgress(
            live.generation.join_key,
            live.engine_id,
            replica_id,
            slot.replica.spec.role if slot else None,
            live.prompt_tokens,
            known.get(live.engine_id, live.output_tokens),
        )
