"""How a hybrid replica is lent to generation and given back to its trainer.

Invariants: requests wait for it from the beginning of a lend to its end, and reach it only when its engine really may
serve; once withdrawn it gets none, whatever its engine is still doing.
"""

from __future__ import annotations

from services.engine.domain.calls import (
    Call,
    Plan,
    Resume,
    WakeUp,
)
from services.engine.domain.kept import Intent
from services.engine.domain.memory_plans import MemoryPlans
from services.engine.domain.roles import keeps_memory, sleep_level
from services.engine.domain.spec import (
    WEIGHTS,
    PauseMode,
    Weights,
)


class LendPlans(MemoryPlans):
    """The steps of a lend, each of which may be repeated."""

    def begin_lend(self, lend_id: str) -> Plan:
        """Take part in a lend: requests are held for it, and its weight memory is refilled."""
        if self.lend_id and self.lend_id != lend_id:
            raise self._refusal("LEND_OPEN", f"lend {self.lend_id!r} is open", lend_id=self.lend_id)
        if not self.lend_id:
            self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
            self.lend_id = lend_id
            self._started_anew = False
        if self.intent is Intent.OUT:
            self.intent = Intent.HOLD
        if keeps_memory(self.spec) is not None or WEIGHTS in self.state.resident_tags:
            return Plan()
        return Plan((WakeUp(frozenset({WEIGHTS})),))

    def plan_finish_lend(self, weight_version: int) -> Plan:
        """What has to happen before it serves under `weight_version`."""
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        if keeps_memory(self.spec) is None:
            self._refuse_if(WEIGHTS in self.asleep_tags, "TAG_ASLEEP")
        self._refuse_if(self.weights is Weights.DISCARDED, "WEIGHTS_DISCARDED")
        self._refuse_if(self.weights is Weights.HALF_UPDATED, "WEIGHTS_HALF_UPDATED")
        if self.weight_version != weight_version:
            raise self._refusal(
                "VERSION_MISMATCH",
                f"it holds weight version {self.weight_version}, not {weight_version}",
                field="weight_version",
                value=weight_version,
                current=self.weight_version,
            )
        self._refuse_if_not_vacated()
        if self.intent is Intent.SERVE and not self.blocker():
            return Plan()
        wake: tuple[Call, ...] = (WakeUp(self.asleep_tags),) if self.asleep_tags else ()
        return Plan((*wake, self._full_reset(), Resume()))

    def finish_lend(self) -> None:
        """It serves from now on; refused unless its engine really may."""
        blocker = self.blocker()
        self._refuse_if(bool(blocker), blocker)
        self.intent = Intent.SERVE

    def fail_lend(self) -> None:
        """A step of the lend failed here: requests must not wait for it. Repeating the step makes it good."""
        if self.intent is Intent.HOLD:
            self.intent = Intent.OUT

    def withdraw(self) -> None:
        """Give its GPUs back to the trainer: no request goes there, its lend is closed, an update abandoned."""
        self.intent = Intent.OUT
        self.lend_id = ""
        self.unvacated = frozenset()
        if self.update_id:
            self.close_update()

    def plan_free(self) -> Plan:
        """What has to happen before the trainer may use its GPUs, after `withdraw`."""
        if self.confirmed_free:
            return Plan()
        quiesce = self._quiesce(PauseMode.ABORT)
        if keeps_memory(self.spec) is not None:
            return Plan(quiesce)
        return Plan((*quiesce, *self._put_to_sleep(sleep_level(self.spec, None))))
