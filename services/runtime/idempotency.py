"""Repeatable calls: one request_id, one effect, one answer.

Invariants: only OK answers are kept; of a run none longer than `ttl_s`, at most `limit` of them, and at most `FEW` that
are older than `RECENT_S`, the oldest going first; while the first call with an id is at work its duplicates wait for
it; the same id with other content is refused and changes nothing. Time is passed in.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from google.protobuf.message import Message

from services.runtime.errors import invalid_argument

T = TypeVar("T")

TTL_S: Final = 3600.0
"""A client that still repeats a call after an hour has given up long ago."""

LIMIT: Final = 100_000
"""Answers kept per run: more than any trainer sends in an hour, and some 50 MB against one that does."""

RECENT_S: Final = 120.0
"""Four times what a client gives a call with all its attempts: what is older is repeated by hardly anybody. Many
workers get more answers in an hour than memory should hold, and all but the newest would be for nobody."""

FEW: Final = 1024
"""So many may be old: all of an hour of a trainer's calls, and no more than half a megabyte."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was given at `at`; `held` is what stands for it: see `of`."""

    call: str
    fingerprint: bytes
    at: float
    held: object

    @classmethod
    def of(cls, call: str, fingerprint: bytes, at: float, value: object) -> Answer:
        """Return what keeps `value`: of a message its bytes, since one that lives takes a kilobyte, however small."""
        if isinstance(value, Message):
            value = _Bytes(type(value), value.SerializeToString())
        return cls(call, fingerprint, at, value)

    @property
    def value(self) -> object:
        """What was answered."""
        if isinstance(self.held, _Bytes):
            return self.held.kind.FromString(self.held.content)
        return self.held


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A message."""

    kind: type[Message]
    content: bytes


@dataclass(frozen=True, slots=True)
class _AtWork:
    call: str
    fingerprint: bytes
    ended: asyncio.Event


def fingerprint(message: Message, ignore: Iterable[str] = ()) -> bytes:
    """Return what tells two requests apart, leaving out the fields named in `ignore` (those a repeat may change)."""
    ignored = tuple(ignore)
    if ignored:
        copy = type(message)()
        copy.CopyFrom(message)
        for name in ignored:
            copy.ClearField(name)
        message = copy
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


class Answers:
    """The answers already given, by run and request_id."""

    def __init__(self, ttl_s: float = TTL_S, limit: int = LIMIT) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._kept: dict[str, OrderedDict[str, Answer]] = {}
        self._at_work: dict[tuple[str, str], _AtWork] = {}

    async def once(
        self,
        run_id: str,
        call: str,
        request_id: str,
        fingerprint: bytes,
        now: float,
        execute: Callable[[], Awaitable[T]],
    ) -> T:
        """Return what `execute` gives, or the answer it already gave for this `request_id`.

        An empty `request_id` makes the call unrepeatable: it is executed. A failure is not kept: a repeat, and a
        duplicate that waited, execute again. `now` is in seconds of the clock that `ttl_s` is meant in. Raises
        INVALID_ARGUMENT / REQUEST_ID_REUSED if the id came with another call or other content.
        """
        if not request_id:
            return await execute()
        key = (run_id, request_id)
        while (busy := self._at_work.get(key)) is not None:
            self._check_same(request_id, busy, call, fingerprint)
            await busy.ended.wait()
        kept = self._find(run_id, request_id, now)
        if kept is not None:
            self._check_same(request_id, kept, call, fingerprint)
            return cast(T, kept.value)
        self._at_work[key] = _AtWork(call, fingerprint, asyncio.Event())
        try:
            value = await execute()
            self._keep(run_id, request_id, Answer.of(call, fingerprint, now, value))
            return value
        finally:
            self._at_work.pop(key).ended.set()

    def has(self, run_id: str, request_id: str, now: float) -> bool:
        """Whether `once` would give an answer that it already gave."""
        return bool(request_id) and self._find(run_id, request_id, now) is not None

    def remember(self, run_id: str, call: str, request_id: str, fingerprint: bytes, at: float, value: object) -> None:
        """Keep an answer that an earlier process gave at `at`."""
        self._keep(run_id, request_id, Answer.of(call, fingerprint, at, value))

    def kept(self, run_id: str) -> list[tuple[str, Answer]]:
        """The kept answers of a run by request_id, oldest first; for `remember`."""
        return list(self._kept.get(run_id, {}).items())

    def runs(self) -> list[str]:
        """The runs of which answers are kept."""
        return list(self._kept)

    def forget_run(self, run_id: str) -> None:
        """Drop every answer of a run that is gone."""
        self._kept.pop(run_id, None)

    def __len__(self) -> int:
        return sum(len(answers) for answers in self._kept.values())

    @staticmethod
    def _check_same(request_id: str, first: Answer | _AtWork, call: str, fingerprint: bytes) -> None:
        if (first.call, first.fingerprint) != (call, fingerprint):
            raise invalid_argument(
                "request_id",
                f"this request_id was used before, by {first.call} with other content",
                value=request_id,
                reason="REQUEST_ID_REUSED",
                first_call=first.call,
            )

    def _find(self, run_id: str, request_id: str, now: float) -> Answer | None:
        answers = self._kept.get(run_id)
        if answers is None:
            return None
        # Kept in the order in which they were given, which is about that of their times.
        while answers and next(iter(answers.values())).at + self._ttl_s <= now:
            answers.popitem(last=False)
        if not answers:
            del self._kept[run_id]
        answer = answers.get(request_id)
        return None if answer is None or answer.at + self._ttl_s <= now else answer

    def _keep(self, run_id: str, request_id: str, answer: Answer) -> None:
        answers = self._kept.setdefault(run_id, OrderedDict())
        answers[request_id] = answer
        while len(answers) > self._limit or (
            len(answers) > FEW and next(iter(answers.values())).at + RECENT_S <= answer.at
        ):
            answers.popitem(last=False)
