"""What a check found, and what to do about it.

Invariant: whatever is not OK comes with advice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and may not for long, or not well."""
    PROBLEM = "problem"
    """Something does not work, or will not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `subject`: what was looked at; `advice`: what to do, empty if OK."""

    check: str
    subject: str
    verdict: Verdict
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.OK) == bool(self.advice):
            raise ValueError(f"{self.check}: advice goes with what is wrong, and with nothing else")

    def to_dict(self) -> dict[str, str]:
        """As JSON has it."""
        return asdict(self)


def ok(check: str, subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, subject, Verdict.OK, text)


def warning(check: str, subject: str, text: str, advice: str) -> Finding:
    """Not well, but it works."""
    return Finding(check, subject, Verdict.WARNING, text, advice)


def problem(check: str, subject: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, subject, Verdict.PROBLEM, text, advice)
