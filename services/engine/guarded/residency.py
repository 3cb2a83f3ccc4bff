"""What an engine holds and does, as far as it is known, and what must therefore not be asked of it.

vLLM, like the others, tells neither which tags are asleep nor whether its weights mean anything, and carries out what
kills it: resuming over freed memory, generating from discarded weights, sleeping under running requests. So it is
remembered here.

Invariants: a request is admitted only if every tag is resident, the weights are intact and no cache is older than
they are; scheduling is never started while a tag is asleep; what is refused has not reached the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.engine.domain.spec import KV_CACHE, WEIGHTS, PauseMode, Weights
from services.engine.guarded.surface import Reading
from services.runtime.errors import TurnoutError, failed_precondition, invalid_argument

TAGS: Final = frozenset({WEIGHTS, KV_CACHE})
"""The tags that vLLM's executor manages."""

LEVELS: Final = (1, 2)
"""vLLM also takes 0, which is a pause, and whatever number comes."""

LOSING_LEVEL: Final = 2
"""The sleep level that throws weights away."""


@dataclass(slots=True)
class Residency:
    """The state of one engine."""

    name: str
    tags: frozenset[str] = TAGS
    version: int = 0
    weights: Weights = Weights.INTACT
    asleep: frozenset[str] = frozenset()
    level: int = 0
    paused: bool = False
    pause_mode: PauseMode | None = None
    cache_stale: bool = False
    updating: bool = False
    doubtful: bool = True
    """A call that moves memory failed, or nothing was read yet: what is behind each tag counts, not what was asked."""
    _read_before: bool = False

    @property
    def resident(self) -> frozenset[str]:
        return self.tags - self.asleep

    # ------------------------------------------------------------------------------------------------ what is refused

    def admit(self) -> None:
        """Refuse a request that the engine would die of, or answer with garbage."""
        if self.asleep:
            raise self._refusal("TAG_ASLEEP", f"{', '.join(sorted(self.asleep))} is asleep")
        if self.weights is Weights.DISCARDED:
            raise self._refusal("WEIGHTS_DISCARDED", "it has no weights")
        if self.weights is Weights.HALF_UPDATED:
            raise self._refusal("WEIGHTS_HALF_UPDATED", "a weight update is not complete")
        if self.cache_stale:
            raise self._refusal("CACHE_OLDER_THAN_WEIGHTS", "its caches are older than its weights")

    def check_resume(self) -> None:
        """Refuse to schedule over freed memory or without weights."""
        self.admit()

    def check_sleep(self, level: int, unfinished: int) -> None:
        """Refuse a level that is none, and to free memory under requests, unless those are kept to be recomputed."""
        if level not in LEVELS:
            raise invalid_argument("level", f"a sleep has level 1 or 2, not {level}", value=level)
        if unfinished and not (self.paused and self.pause_mode is PauseMode.KEEP):
            raise self._refusal("NOT_DRAINED", f"{unfinished} requests are in it")

    def check_tags(self, tags: frozenset[str]) -> None:
        """Refuse tags that the engine does not have: one of them would void the whole call without a word."""
        unknown = sorted(tags - self.tags)
        if unknown:
            raise invalid_argument(
                "tags", f"{self.name} has no tag {unknown[0]!r}", value=unknown[0], reason="UNKNOWN_TAG"
            )

    def check_release(self) -> None:
        """Refuse to free KV memory of an engine that is not paused and fully awake."""
        if not self.paused:
            raise self._refusal("NOT_PAUSED", "it is not paused")
        if self.asleep:
            raise self._refusal("TAG_ASLEEP", f"{', '.join(sorted(self.asleep))} is asleep already")

    def check_write(self) -> None:
        """Refuse weights for memory that is asleep, or that nobody announced."""
        if not self.updating:
            raise self._refusal("UPDATE_NOT_STARTED", "it expects no weights")
        if WEIGHTS in self.asleep:
            raise self._refusal("TAG_ASLEEP", "its weights are asleep")

    # ------------------------------------------------------------------------------------------------- what happened

    def observe(self, reading: Reading) -> None:
        """Let what the engine says win over what is remembered: others may have reached it too."""
        if reading.asleep is False and (self.asleep or self.paused):
            self.woke(self.tags)
            self.started()
        elif reading.asleep_tags and not self.asleep:
            self.found_asleep(reading.asleep_tags, reading.sleep_level)
        elif (reading.asleep or reading.paused) and not self.paused:
            self.stopped(None)
        if reading.paused is False and not self.asleep:
            self.started()
        if self.doubtful and reading.tagged_bytes is not None and reading.asleep is not False:
            empty = frozenset(tag for tag, size in reading.tagged_bytes.items() if not size)
            if empty != self.asleep:
                self.found_asleep(empty, self.level or None)
        # A reading without memory settles nothing.
        self.doubtful &= reading.tagged_bytes is None
        told = reading.weight_version or ""
        if told.isdecimal() and int(told) != self.version and not self.updating:
            # Whoever gave it other weights did not empty its caches; before the first reading there are no others.
            self.version, self.cache_stale = int(told), self.cache_stale or self._read_before
        if reading.sleep_level == LOSING_LEVEL and not self._read_before:
            self.weights = Weights.DISCARDED
        self._read_before = True

    def slept(self, level: int) -> None:
        """Everything was freed."""
        if LOSING_LEVEL in (level, self.level):
            self.weights = Weights.DISCARDED
        self.level = level
        self.asleep = self.tags
        self.stopped(self.pause_mode if self.paused else PauseMode.ABORT)

    def found_asleep(self, tags: frozenset[str], level: int | None) -> None:
        """These tags turned out to be asleep; without a level nothing can be said for the weights."""
        if WEIGHTS in tags:
            self.level = level or LOSING_LEVEL
            if self.level == LOSING_LEVEL:
                self.weights = Weights.DISCARDED
        self.asleep = tags
        if tags and not self.paused:
            self.stopped(None)

    def released(self) -> None:
        """KV memory was freed."""
        self.asleep |= {KV_CACHE}

    def woke(self, tags: frozenset[str], schedules: bool = True) -> None:
        """Memory is back. With the last of it vLLM starts scheduling, and SGLang does not."""
        self.asleep -= tags
        if not self.asleep:
            self.level = 0
            if schedules:
                self.started()

    def stopped(self, mode: PauseMode | None) -> None:
        """It does not schedule any more."""
        self.paused, self.pause_mode = True, mode

    def started(self) -> None:
        """It schedules."""
        self.paused, self.pause_mode = False, None

    def touched(self) -> None:
        """New weights are on their way."""
        self.weights = Weights.HALF_UPDATED

    def loaded(self, version: int) -> None:
        """All weights are there."""
        self.weights, self.version, self.cache_stale = Weights.INTACT, version, True

    def fit(self) -> bool:
        """Whether it may serve once it is awake."""
        return self.weights is Weights.INTACT and not self.cache_stale

    def _refusal(self, reason: str, why: str) -> TurnoutError:
        return failed_precondition(reason, f"{self.name}: {why}", replica_id=self.name)
