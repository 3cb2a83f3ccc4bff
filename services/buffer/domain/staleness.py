"""Staleness: what an age means at a step.

Invariants: span = step - born + 1, so a group born at this step has span 1; a group born in the future (its trainer
overtook the caller's step) counts as span 1, never less; no bound means never stale and never held.
"""

from services.buffer.domain.config import Staleness, Strategy


def span(step: int, born: int) -> int:
    """Versions between birth and `step`, both included; at least 1."""
    return max(1, step - born + 1)


def oldest_kept(staleness: Staleness, step: int) -> int | None:
    """Smallest born step that is not stale at `step` under DROP; None: nothing is ever stale."""
    if staleness.strategy is not Strategy.DROP or staleness.max_versions is None:
        return None
    return step - staleness.max_versions + 1


def youngest_holder(staleness: Staleness, step: int) -> int | None:
    """Largest born step whose started groups hold sampling at `step` under WAIT; None: nothing ever holds.

    A group holds when its span reaches max_versions: one step later it would be too old. With max_versions 1 the
    groups of the present step hold, those born in the future do not.
    """
    if staleness.strategy is not Strategy.WAIT or staleness.max_versions is None:
        return None
    return step - staleness.max_versions + 1


def reborn_at_claim(staleness: Staleness, step: int, born: int) -> bool:
    """Whether an unstarted group that is claimed at `step` starts a new life under WAIT."""
    holder = youngest_holder(staleness, step)
    return holder is not None and born <= holder and born < step
