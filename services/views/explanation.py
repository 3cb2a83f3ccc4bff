"""Why a run's GPUs moved, or stayed: its decisions as text and as JSON, pure.

Invariant: what is printed was decided; nothing is worked out again here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.views.report.account import Decision, RunAccount, StepAccount
from services.views.report.lends import Lend
from services.views.table import duration


def explain(account: RunAccount, step: int | None) -> Iterator[str]:
    """Lines on every step, or on `step` alone with all the numbers that its decisions used."""
    for one in account.steps:
        if step is not None and one.number != step:
            continue
        yield _heading(one)
        for lend in _lends(account.lends, one):
            yield f"  {duration(lend.served_at):>12}  {_worth(lend)}"
        for decision in of_step(account, one.number):
            shadow = " (shadow)" if decision.shadow else ""
            yield f"  {duration(decision.at):>12}  {decision.point}: {decision.action}{shadow}. {decision.reason}"
            if step is not None:
                yield from _numbers(decision)


def as_rows(account: RunAccount, step: int | None) -> Iterator[dict[str, Any]]:
    """One object per decision, in order."""
    for decision in account.decisions:
        if step is None or decision.step == step:
            yield {
                "at": round(decision.at, 3),
                "step": decision.step,
                "point": decision.point,
                "action": decision.action,
                "policy": decision.policy,
                "shadow": decision.shadow,
                "reason": decision.reason,
                "predicted_wait_seconds": decision.predicted_wait_s,
                "threshold": decision.threshold,
                "numbers": dict(decision.numbers),
            }


def of_step(account: RunAccount, step: int) -> Sequence[Decision]:
    """The decisions of a step that say something."""
    return [decision for decision in account.decisions if decision.step == step]


def _heading(step: StepAccount) -> str:
    if step.ended_at is None:
        return f"step {step.number}, still going on: waited {duration(step.wait_s + step.lent_s)} so far"
    predicted = "" if step.predicted_wait_s is None else f", {step.predicted_wait_s:.0f} s were predicted"
    lent = f", {duration(step.lent_s)} before the GPUs came back" if step.lent_s else ""
    return (
        f"step {step.number}, {duration(step.ended_at - step.began_at)}: waited {step.wait_s:.0f} s with the GPUs in "
        f"hand{predicted}{lent}"
    )


def _numbers(decision: Decision) -> Iterator[str]:
    for name, value in sorted(decision.numbers.items()):
        yield f"                  {name} = {value:.6g}"


def _lends(lends: Sequence[Lend], step: StepAccount) -> Iterator[Lend]:
    """Those that began to serve before the step and came back in it, or are still lent."""
    for lend in lends:
        back = lend.back_at
        if back is not None and step.began_at <= back and (step.ended_at is None or back <= step.ended_at):
            yield lend


def _worth(lend: Lend) -> str:
    served = duration(lend.served_s or 0.0)
    brought = lend.brought
    kept = (
        f" ({brought.delivered_tokens / brought.decoded_tokens:.0%} kept)" if brought and brought.decoded_tokens else ""
    )
    tokens = "" if brought is None else f"{brought.decoded_tokens:,} tokens decoded{kept}, "
    net = "" if lend.saved_s is None else f", saved at most {lend.saved_s:.0f} s"
    gained = "" if lend.gained_s is None else f", {_against(lend.gained_s)} than the predicted wait without it"
    switching = f"{lend.switch_s:.1f} s of switching"
    return f"lent {lend.kind} for {served}: {tokens}{switching}{net}{gained}"


def _against(gained_s: float) -> str:
    return f"{abs(gained_s):.0f} s {'less' if gained_s >= 0 else 'more'} lost"
