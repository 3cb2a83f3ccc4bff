"""What `turnout doctor` shows on a terminal.

Invariant: what is wrong stands last, with what to do, so that it is on the screen when the command ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.doctor.finding import Finding, Verdict

_MARKS: Final = {
    Verdict.OK: Text("ok", style="green"),
    Verdict.WARNING: Text("warning", style="yellow"),
    Verdict.PROBLEM: Text("problem", style="bold red"),
}


def checkup_table(findings: Sequence[Finding]) -> RenderableType:
    """Return all findings, those that are wrong again with advice, and a last line that adds up."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("check", "what", "", "finding"):
        table.add_column(heading, no_wrap=heading == "check")
    for finding in findings:
        table.add_row(finding.check, Text(finding.subject), _MARKS[finding.verdict], Text(finding.text))
    wrong = [finding for finding in findings if finding.verdict is not Verdict.OK]
    wrong.sort(key=lambda finding: finding.verdict is Verdict.PROBLEM)
    parts: list[RenderableType] = [table]
    for finding in wrong:
        parts.append(Text())
        parts.append(_MARKS[finding.verdict] + Text(f"  {finding.check} of {finding.subject}: {finding.text}"))
        parts.append(Text(f"  do: {finding.advice}"))
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    parts += [Text(), Text(f"{len(findings)} checks, {problems} problems, {len(wrong) - problems} warnings")]
    return Group(*parts)
