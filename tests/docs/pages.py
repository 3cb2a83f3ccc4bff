"""The pages that teach, and what stands in their code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    page for glob in ("*.md", "docs/*.md", "docs/howto/*.md", "clients/*/README.md") for page in ROOT.glob(glob)
)


@dataclass(frozen=True)
class Line:
    """One line of a code block."""

    page: str
    text: str


def code_lines() -> Iterator[Line]:
    """Yield the lines of all code blocks, continued lines joined."""
    for page in PAGES:
        fenced, held = False, ""
        for raw in page.read_text().splitlines():
            if raw.lstrip().startswith("```"):
                fenced = not fenced
                continue
            if not (fenced or raw.startswith("    ")):
                continue
            text = held + raw.strip()
            if text.endswith("\\"):
                held = text.removesuffix("\\")
                continue
            held = ""
            yield Line(str(page.relative_to(ROOT)), text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
