"""Who has the hybrid GPUs: what is intended, and what was seen.

Invariants: TRAINER is reported only while it is intended and every hybrid replica was confirmed free under the engine
controller's present incarnation; another incarnation makes everything seen before void; a transition that failed leaves
the run in between with the reason, until a later one succeeds.
"""

from collections.abc import Iterable, Mapping

from services.scheduler.domain.events import Mode


class Modes:
    """Intention and observation of one run. It begins with the trainer and nothing seen: without hybrids, TRAINER."""

    def __init__(self) -> None:
        self._intent = Mode.TRAINER
        self._stuck = ""
        self._free: dict[str, bool] = {}
        self.revision = 0
        """Changes with every change of which hybrids there are."""
        self.incarnation = ""
        """Incarnation of the controller that was seen last, empty before the first."""

    @property
    def mode(self) -> Mode:
        """Who has the GPUs. TRAINER that is not confirmed is reported as RECLAIMING."""
        if self._intent is Mode.TRAINER and self.unconfirmed:
            return Mode.RECLAIMING
        return self._intent

    @property
    def intent(self) -> Mode:
        """Who is to have the GPUs, whatever was seen."""
        return self._intent

    @property
    def stuck(self) -> str:
        """Why the last transition failed; empty if it did not."""
        return self._stuck

    def restore(self, intent: Mode, stuck: str, hybrids: Iterable[str]) -> None:
        """Go on with what an earlier process intended; of the hybrids it knew, nothing is seen yet."""
        self._intent = intent
        self._stuck = stuck
        self._free = dict.fromkeys(hybrids, False)

    @property
    def lent(self) -> bool:
        """Whether the hybrids serve."""
        return self._intent is Mode.ROLLOUT

    @property
    def in_between(self) -> bool:
        """Whether a lend or its end is under way, or failed and was not undone."""
        return self._intent in (Mode.LENDING, Mode.RECLAIMING)

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """Hybrid replicas that were not confirmed free, by id."""
        return tuple(sorted(replica for replica, free in self._free.items() if not free))

    @property
    def hybrids(self) -> tuple[str, ...]:
        """Hybrid replicas, by id."""
        return tuple(sorted(self._free))

    @property
    def stuck_reason(self) -> str:
        """Why the run is in between, one sentence; empty if nothing failed."""
        if self._stuck:
            return self._stuck
        if self.mode is Mode.RECLAIMING and self._intent is Mode.TRAINER:
            return f"not confirmed free: {', '.join(self.unconfirmed)}"
        return ""

    def saw(self, incarnation: str, hybrids: Mapping[str, bool]) -> None:
        """All hybrid replicas as the controller knows them: whether each is confirmed free."""
        self.incarnation = incarnation
        self.revision += hybrids.keys() != self._free.keys()
        self._free = dict(hybrids)

    def restarted(self, incarnation: str) -> None:
        """Another incarnation of the controller answered: what was confirmed before it is not known any more."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self._free = dict.fromkeys(self._free, False)

    def lending(self) -> None:
        """A lend began."""
        self._go(Mode.LENDING)

    def serving(self) -> None:
        """A lend is complete."""
        self._go(Mode.ROLLOUT)

    def reclaiming(self) -> None:
        """The GPUs are on their way back."""
        self._go(Mode.RECLAIMING)

    def returned(self) -> None:
        """The controller said that all are back; `saw` still has the last word on each."""
        self._go(Mode.TRAINER)

    def failed(self, reason: str) -> None:
        """The present transition failed; the run stays where it is, for `reason`."""
        self._stuck = reason

    def _go(self, mode: Mode) -> None:
        self._intent = mode
        self._stuck = ""
