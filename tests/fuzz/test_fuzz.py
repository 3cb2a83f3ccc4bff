"""A few hundred hostile calls to each service; `make fuzz` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.attack import attack
from tests.fuzz.scene import SERVICES, scene

_CALLS = 120
_SEED = 4


@pytest.mark.timeout(180)
async def test_hostile_calls_are_refused_and_change_nothing(tmp_path: Path) -> None:
    """One message that crashes the buffer, or that passes as another's, undoes everything else that guards it."""
    async with scene(tmp_path) as place:
        found = await attack(place, _CALLS, _SEED, print, *SERVICES)
    assert [problem for findings in found for problem in findings.wrong] == []
    for findings in found:
        assert findings.made >= _CALLS
        # An attack that is refused for one reason alone tests nothing else.
        assert {"UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "NOT_FOUND"} <= findings.codes.keys()
