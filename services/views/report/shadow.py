"""What a policy in the shadow would have done, in one sentence; pure.

Invariant: what it would have gained is what it expected itself: nobody can measure what was not done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.views.report.account import Decision

_PREFIX: Final = "shadow:"
_LEND: Final = 1.0
"""`shadow_action` of a lend, see services/scheduler/policies/shadow.py."""


def shadow_sentence(decisions: Iterable[Decision]) -> str:
    """The sentence, of the decisions at step ends; empty if no policy watched."""
    asked = [decision for decision in decisions if decision.point == "step end" and "shadow_action" in decision.numbers]
    if not asked:
        return ""
    name = asked[-1].policy.removeprefix(_PREFIX)
    lends = [decision for decision in asked if decision.numbers["shadow_action"] == _LEND]
    gains = [decision.numbers["shadow_gain_seconds"] for decision in lends if "shadow_gain_seconds" in decision.numbers]
    acted = sum(decision.action == "lend" for decision in asked)
    differed = sum(decision.numbers.get("shadow_differs", 0.0) > 0 for decision in asked)
    expected = f", expecting to gain {sum(gains):.0f} s in all" if gains else ""
    return (
        f"In the shadow, {name} would have lent at {len(lends)} of {len(asked)} step ends{expected}; "
        f"lent was at {acted}, and they differed at {differed}."
    )
