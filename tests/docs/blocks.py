"""The code blocks of the pages, cut into what can be executed on its own.

Invariants: a block of commands gives one piece a command, continued lines joined; a block in any other language, and
one with a loop in it, is one piece; nothing that is set as code is left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.pages import PAGES, ROOT

_IMPORT = re.compile(r"import |from \w")
_COMPOUND = re.compile(r"^(for|while|if) ", re.MULTILINE)


@dataclass(frozen=True)
class Piece:
    """A command, or a snippet of another language."""

    page: str
    """Path of the page, relative to the repository."""
    language: str
    """`sh` for commands, else what the fence says."""
    text: str

    @property
    def key(self) -> str:
        """What the table names it by: the command without its comment, or the first line that is no import."""
        lines = self.text.splitlines()
        if self.language == "sh" and len(lines) == 1:
            return re.split(r"\s+#\s", self.text)[0]
        return next((line for line in lines if line and not _IMPORT.match(line)), lines[0])


def pieces() -> Iterator[Piece]:
    """Yield what all pages hold, in their order."""
    for page in PAGES:
        yield from pieces_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))


def pieces_of(page: str, text: str) -> Iterator[Piece]:
    """Yield what one page holds."""
    for language, block in _blocks(text):
        if language != "sh" or _COMPOUND.search(block):
            yield Piece(page, language, block)
            continue
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            if line.strip():
                yield Piece(page, language, line.strip())


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each block; an indented one is of commands."""
    lines = iter(text.splitlines())
    held: list[str] = []
    blank = True
    for line in lines:
        fence = re.match(r"^\s*```(\S*)", line)
        if fence is None and line.startswith("    ") and (held or blank):
            held.append(line)
            continue
        if held and line.strip():
            yield "sh", textwrap.dedent("\n".join(held)).strip()
            held = []
        if fence is not None:
            inside: list[str] = []
            for inner in lines:
                if inner.strip() == "```":
                    break
                inside.append(inner)
            yield fence[1] or "text", textwrap.dedent("\n".join(inside)).strip()
        blank = not line.strip()
    if held:
        yield "sh", textwrap.dedent("\n".join(held)).strip()
