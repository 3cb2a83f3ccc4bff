"""How a service goes on after its journal failed."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from services.runtime.errors import data_loss, unavailable
from services.runtime.journal import Journal, JournalFailure, JournalState, mending
from services.runtime.journal.mending import EXIT_FAILED, Mending


class Broken:
    """A journal that failed once."""

    def __init__(self, *, fatal: bool = False) -> None:
        self.state = JournalState.FATAL if fatal else JournalState.FAILED
        self.failures = [JournalFailure(unavailable("JOURNAL_IO", "no"), fatal)]

    async def failed(self) -> JournalFailure:
        if not self.failures:
            await asyncio.Event().wait()
        return self.failures.pop()

    async def reopen(self) -> None:
        self.state = JournalState.OPEN


class Owner:
    """A service: what became of it, in order; its first `errors` attempts fail."""

    def __init__(self, *errors: Exception) -> None:
        self.said: list[str] = []
        self._errors = list(errors)
        self.done = asyncio.Event()

    async def suspend(self) -> None:
        self.said.append("suspended")

    async def agree(self, journal: Journal) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.said.append("agreed")

    def go_on(self) -> None:
        self.said.append("serving")
        self.done.set()

    def exit(self, code: int) -> None:
        self.said.append(f"exit {code}")
        self.done.set()

    async def mended(self, journal: Broken) -> list[str]:
        of_it = Mending("owner", self.suspend, self.agree, self.go_on, self.exit)
        watching = asyncio.ensure_future(of_it.watch(cast(Journal, journal), lambda: None))
        await asyncio.wait_for(self.done.wait(), 20)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return self.said


async def test_what_was_read_before_it_failed_again_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refused the first record after loading left the service open, over a disk that stores nothing."""
    monkeypatch.setattr(mending, "RETRY_S", 0.0)
    said = await Owner(unavailable("JOURNAL_IO", "still"), OSError("no room")).mended(Broken())
    assert said == ["suspended", "suspended", "suspended", "agreed", "serving"]


@pytest.mark.parametrize("errors", [(), (data_loss("JOURNAL_DAMAGED", "a hole"),)])
async def test_a_disk_that_cannot_be_trusted_ends_the_process(errors: tuple[Exception, ...]) -> None:
    """Going on would answer for records that are not there."""
    said = await Owner(*errors).mended(Broken(fatal=not errors))
    assert said[:2] == ["suspended", f"exit {EXIT_FAILED}"]
