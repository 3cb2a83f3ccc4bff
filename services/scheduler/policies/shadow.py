"""`shadow:<policy>`: verl (or off) acts, the other policy is asked the same and only heard.

Invariants: the action, threshold and placement are always those of the acting policy; a shadow that cannot answer
changes nothing; both see the same events, so what the shadow says is what it would do in the state that the acting
policy brought about.
"""

from dataclasses import replace

from services.scheduler.policies.base import Policy
from services.scheduler.policies.errors import EventOrderError
from services.scheduler.policies.types import Action, Decision, Event, Point, PolicyConfig, RunOpened
from services.scheduler.policies.verl import VerlPolicy

PREFIX = "shadow:"
_CODES = {Action.KEEP: 0.0, Action.LEND: 1.0, Action.RECLAIM: 2.0}


class ShadowPolicy:
    """`verl` acts; it behaves as `off` while switching is off. `shadow` is created with switching on in any case."""

    def __init__(self, config: PolicyConfig, shadow: Policy) -> None:
        self.name = PREFIX + shadow.name
        self.reads_progress = bool(getattr(shadow, "reads_progress", False))
        self._acting = VerlPolicy(config)
        self._shadow = shadow

    def observe(self, event: Event) -> None:
        self._acting.observe(event)
        if isinstance(event, RunOpened):
            event = replace(event, config=switching(event.config))
        self._shadow.observe(event)

    def decide(self, point: Point, now: float) -> Decision:
        acting = self._acting.decide(point, now)
        try:
            heard = self._shadow.decide(point, now)
        except EventOrderError:
            return acting
        numbers = dict(acting.numbers)
        numbers |= {f"shadow_{name}": value for name, value in heard.numbers.items()}
        numbers["shadow_action"] = _CODES[heard.action]
        if heard.predicted_wait_s is not None:
            numbers["shadow_predicted_wait_seconds"] = heard.predicted_wait_s
        numbers["shadow_differs"] = float(heard.action is not acting.action)
        return Decision(
            action=acting.action,
            reason=f"{acting.reason} In the shadow {self._shadow.name} would {heard.action.value}: {heard.reason}",
            placement=acting.placement,
            predicted_wait_s=acting.predicted_wait_s,
            numbers=numbers,
            recheck_at=_sooner(acting.recheck_at, heard.recheck_at),
            threshold=acting.threshold,
        )


def switching(config: PolicyConfig) -> PolicyConfig:
    """What a shadow is configured with: it is asked what it would do, also where nothing may move.

    Raises IncompatibleError if there are no standalone GPUs to lend beside.
    """
    return replace(config, switch=replace(config.switch, enable_switch=True))


def _sooner(first: float | None, second: float | None) -> float | None:
    times = [at for at in (first, second) if at is not None]
    return min(times) if times else None
