"""The audit of a job whose processes were killed finds what must not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.ray_deploy.accounts import discrepancies
from tests.ray_deploy.crew import Crew

LEDGER = {"added": 3, "committed": 2, "evicted": 0, "present": 1}


def trained(group: str, *tokens: int, digest: str = "a") -> dict[str, Any]:
    return {"group_id": group, "tokens": list(tokens), "digest": digest}


def acknowledged(group: str, index: int, tokens: int) -> dict[str, Any]:
    return {"event": "acknowledged", "group_id": group, "index": index, "tokens": tokens}


def audit(read: list[dict[str, Any]], told: list[dict[str, Any]], **ledger: int) -> list[str]:
    worker = SimpleNamespace(lines=[(0.0, line) for line in told])
    crew = SimpleNamespace(said=lambda _: [(0.0, line) for line in read], workers=[worker])
    return discrepancies(cast(Crew, crew), {**LEDGER, **ledger}, group_size=2)


READ = [trained("g0", 5, 6), trained("g1", 7, 8)]
TOLD = [acknowledged("g0", 0, 5), acknowledged("g0", 1, 6), acknowledged("g1", 1, 8), acknowledged("g2", 0, 9)]


def test_books_that_agree_have_no_discrepancy() -> None:
    """A group that was read twice, since the trainer died before it committed, is no discrepancy either."""
    assert audit([*READ, READ[0]], TOLD) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (audit(READ, TOLD, added=4), "does not balance"),
        (audit(READ[:1], TOLD[:2]), "2 groups were committed, 1 were trained on"),
        (audit([*READ, trained("g0", 5, 6, digest="b")], TOLD), "g0 was read with 2 contents"),
        (audit(READ, [*TOLD, TOLD[0]]), "trajectory 0 of g0 was acknowledged 2 times"),
        (audit(READ, [*TOLD, acknowledged("g1", 0, 9)]), "trajectory 0 of g1 was read with other tokens"),
        (audit(READ, [*TOLD, acknowledged("g3", 0, 1), acknowledged("g3", 1, 1)]), "3 acknowledged trajectories"),
    ],
)
def test_each_kind_of_loss_is_told(found: list[str], said: str) -> None:
    """An audit that compares nothing would pass every chaos."""
    assert any(said in one for one in found), found
