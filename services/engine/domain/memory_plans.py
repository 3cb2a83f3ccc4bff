"""How a replica's memory is freed and refilled, its scheduling stopped and started, its caches emptied.

Invariant: a plan is made, or refused, before anything reaches an engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.domain.belief import Belief
from services.engine.domain.calls import (
    Call,
    Drain,
    Pause,
    Plan,
    ReleaseKv,
    ResetCaches,
    Resume,
    ResumeKv,
    Sleep,
    WakeUp,
)
from services.engine.domain.engine_state import NATIVE_RELEASE
from services.engine.domain.roles import kv_skip, sleep_level, sleep_skip, wake_tags
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Cache,
    PauseMode,
    Role,
)
from services.runtime.errors import invalid_argument


class MemoryPlans(Belief):
    """Plans for single calls, and the pieces that other plans are made of."""

    def plan_settle(self) -> Plan:
        """Have the engine answer behind a sleep that it may still come to: awake, it must not be taken for that before.

        One that schedules was told so after the sleep, which is paused for; one that is paused is where a pause brings
        it.
        """
        if not self._may_sleep or self.fully_asleep or not self.state.paused:
            return Plan()
        return Plan((Pause(self.state.pause_mode or PauseMode.ABORT, self._cleared_pause),))

    def plan_sleep(self, asked: int | None, mode: PauseMode) -> Plan:
        """Free all memory; `asked` is 1, 2 or None for AUTO."""
        skip = sleep_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        level = sleep_level(self.spec, asked)
        if self.fully_asleep:
            if self.state.sleep_level == level:
                return Plan()
            raise self._refusal(
                "ASLEEP_AT_OTHER_LEVEL", f"it sleeps at level {self.state.sleep_level}, not {level}", level=level
            )
        return Plan((*self._quiesce(mode), *self._put_to_sleep(level)))

    def plan_wake(self, asked: frozenset[str] | None) -> Plan:
        """Refill memory; None is all tags."""
        skip = sleep_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        tags = wake_tags(self.spec, self.state.declared_tags, asked)
        self.check_tags(tags)
        missing = tags & self.asleep_tags
        if not missing:
            return Plan()
        if missing != {WEIGHTS}:
            self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
            self._refuse_if_not_vacated()
        return Plan((WakeUp(missing), ResetCaches(frozenset({Cache.PREFIX}), reset_connectors=True)))

    def check_tags(self, tags: Iterable[str]) -> None:
        """Refuse tags that the engine does not declare."""
        unknown = sorted(set(tags) - self.state.declared_tags)
        if unknown:
            declared = ", ".join(sorted(self.state.declared_tags))
            raise invalid_argument(
                "tags",
                f"{self.replica_id} has no tag {unknown[0]!r}; it declares {declared}",
                value=unknown[0],
                reason="UNKNOWN_TAG",
                replica_id=self.replica_id,
            )

    def plan_release_kv(self) -> Plan:
        """Free KV memory and keep the weights."""
        skip = kv_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        if KV_CACHE not in self.state.resident_tags:
            return Plan()
        if not self.state.paused:
            raise self._refusal("NOT_PAUSED", "pause it before its KV memory is freed")
        self._refuse_if(bool(self.asleep_tags), "TAG_ASLEEP")
        recomputes = self.state.pause_mode is PauseMode.KEEP and self._cleared_pause
        if self.state.running and not recomputes:
            raise self._refusal("NOT_DRAINED", f"{self.state.running} requests still hold KV memory")
        return self._release()

    def plan_resume_kv(self) -> Plan:
        """Refill KV memory."""
        skip = kv_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        if KV_CACHE in self.state.resident_tags:
            return Plan()
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        self._refuse_if_not_vacated()
        if self.asleep_tags != {KV_CACHE}:
            raise self._refusal("TAG_ASLEEP", "other tags than kv_cache are asleep: wake it up")
        return Plan((ResumeKv(),))

    def plan_pause(self, mode: PauseMode, clear_cache: bool) -> Plan:
        """Stop scheduling."""
        if not self.state.paused:
            stop = Pause(mode, clear_cache)
            return Plan((stop,) if mode is PauseMode.KEEP else (stop, Drain()))
        now = self.state.pause_mode
        if now is not None and now is not mode:
            raise self._refusal("PAUSED_IN_OTHER_MODE", f"it is paused in mode {now.value}", current=now.value)
        return Plan()

    def plan_resume(self) -> Plan:
        """Start scheduling."""
        self._refuse_unless_fit()
        self._refuse_if(self.lending, "REPLICA_LENDING")
        return Plan((Resume(),)) if self.state.paused else Plan()

    def plan_reset(self, caches: frozenset[Cache], running: bool, connectors: bool) -> Plan:
        """Empty caches; an empty set is all of them."""
        return Plan((ResetCaches(caches or ALL_CACHES, running, connectors),))

    def _quiesce(self, mode: PauseMode) -> tuple[Call, ...]:
        if self.fully_asleep:
            return ()
        if not self.state.paused:
            return (Pause(mode), Drain())
        if mode is not PauseMode.ABORT and self.state.pause_mode is PauseMode.KEEP and self.state.running:
            raise self._refusal("PAUSED_IN_OTHER_MODE", "it is paused in mode keep: its requests would never end")
        return (Drain(),)

    def _put_to_sleep(self, level: int) -> tuple[Call, ...]:
        if self.spec.role is Role.HYBRID:
            return (Sleep(level), ResetCaches(frozenset({Cache.ENCODER})))
        return (Sleep(level),)

    def _release(self) -> Plan:
        if NATIVE_RELEASE in self.state.capabilities:
            return Plan((ReleaseKv(),), method="native")
        others = self.state.declared_tags - {KV_CACHE}
        return Plan((Sleep(sleep_level(self.spec, None)), WakeUp(others)), method="sleep_wake")

    def _full_reset(self) -> ResetCaches:
        return ResetCaches(ALL_CACHES, reset_running_requests=True, reset_connectors=True)
