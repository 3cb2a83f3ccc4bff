"""Writes docs/api.md from the protos, or checks that it is what they give.

Invariants: the page holds what the protos say and nothing else: every service, call, message and enum of the contract
with its comments; the same protos give the same bytes.

    python3 -m tools.apidoc            write the page
    python3 -m tools.apidoc --check    exit 1 if it differs
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROTOS: Final = ROOT / "protos"
PAGE: Final = ROOT / "docs" / "api.md"

INTRODUCTION: Final = """# API

Generated from `protos/` by `python3 -m tools.apidoc`; do not edit. The conventions at the head of each service hold for
all of its calls. Fields marked *optional* tell absent from the default; `oneof` names stand before their fields.
"""

_BLOCK = re.compile(r"^(service|message|enum|oneof) (\w+) \{(\})?$")
_RPC = re.compile(r"^rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\);$")
_FIELD = re.compile(r"^(optional |repeated )?(map<[^>]+>|[\w.]+) (\w+) = (\d+);$")
_VALUE = re.compile(r"^(\w+) = (\d+);$")


class NotUnderstood(Exception):
    """A line that this reader of protos does not know. buf's style keeps to those it does."""


@dataclass
class Entry:
    """A call, a field or an enum value."""

    name: str
    kind: str
    number: str
    comment: str
    oneof: str = ""


@dataclass
class Block:
    """A service, message or enum."""

    kind: str
    name: str
    comment: str
    entries: list[Entry] = field(default_factory=list)


def read(text: str) -> tuple[str, str, list[Block]]:
    """Return a proto's package, its opening comment and its blocks, in order. Raises NotUnderstood."""
    package, opening, blocks = "", "", list[Block]()
    comment: list[str] = []
    oneof, depth = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("//"):
            # A line of dashes is a divider, not a comment.
            comment += [] if line.startswith("// ---") else [raw.strip()[2:].removeprefix(" ")]
            continue
        said, comment = comment, []
        if not line or line.startswith(("import ", "option ")):
            continue
        if line.startswith("syntax"):
            opening = "\n".join(said)
        elif line.startswith("package "):
            package = line.removeprefix("package ").rstrip(";")
        elif line == "}":
            oneof, depth = ("", depth - 1) if not oneof else ("", depth)
        elif found := _BLOCK.match(line):
            kind, name, closed = found.groups()
            if kind == "oneof":
                oneof = name
            else:
                blocks.append(Block(kind, name, " ".join(said)))
                depth += 0 if closed else 1
        elif depth and (found := _RPC.match(line)):
            call, sends, request, answers, response = found.groups()
            shape = f"{sends or ''}{request} → {answers or ''}{response}"
            blocks[-1].entries.append(Entry(call, shape, "", " ".join(said)))
        elif depth and blocks[-1].kind == "enum" and (found := _VALUE.match(line)):
            blocks[-1].entries.append(Entry(found[1], "", found[2], " ".join(said)))
        elif depth and (found := _FIELD.match(line)):
            label, kind, name, tag = found.groups()
            blocks[-1].entries.append(Entry(name, f"{label or ''}{kind}", tag, " ".join(said), oneof))
        else:
            raise NotUnderstood(f"line {number}: {raw}")
    return package, opening, blocks


def page(protos: Path) -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for path in sorted(path for path in protos.rglob("*.proto") if "storage" not in path.parts):
        package, opening, blocks = read(path.read_text(encoding="utf-8"))
        parts.append(f"## `{package}`: {path.stem}.proto\n\n{_opening(opening)}")
        for kind in ("service", "message", "enum"):
            parts += [section for block in blocks if block.kind == kind for section in _section(block)]
    return "\n".join(parts)


def _opening(comment: str) -> str:
    """The opening of a file is Markdown already, but for its indented drawing and lists."""
    lines, fenced = list[str](), False
    for line in comment.splitlines():
        drawing = line.startswith("  ") and not line.lstrip().startswith("* ") and not _goes_on(lines, fenced)
        if (drawing and not fenced) or (fenced and not line.startswith("  ")):
            lines.append("```")
        fenced = drawing if not fenced else line.startswith("  ")
        item = not fenced and line.lstrip().startswith("* ")
        if item and lines and lines[-1] and not lines[-1].startswith(("* ", "  ")):
            lines.append("")
        lines.append(line if fenced else re.sub(r"^  \* ", "* ", re.sub(r"^    ", "  ", line)))
    return "\n".join([*lines, *(["```"] if fenced else []), ""])


def _goes_on(lines: list[str], fenced: bool) -> bool:
    """Tell whether an indented line continues a list item."""
    return not fenced and bool(lines) and lines[-1].startswith(("* ", "  "))


def _section(block: Block) -> Iterator[str]:
    yield f"### {block.name}\n\n{_text(block.comment)}\n"
    if block.kind == "service":
        for call in block.entries:
            yield f"- **{call.name}** (`{call.kind}`): {_text(call.comment)}"
        yield ""
        return
    if not block.entries:
        return
    yield (
        "| field | type | no. | |\n| --- | --- | --- | --- |"
        if block.kind == "message"
        else "| value | no. | |\n| --- | --- | --- |"
    )
    for entry in block.entries:
        name = f"`{entry.oneof}.{entry.name}`" if entry.oneof else f"`{entry.name}`"
        middle = f"`{entry.kind}` | {entry.number}" if block.kind == "message" else entry.number
        yield f"| {name} | {middle} | {_text(entry.comment)} |"
    yield ""


def _text(comment: str) -> str:
    return comment.replace("|", "\\|").replace("<", "&lt;").strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/api.md from the protos.")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    options = parser.parse_args(argv)
    fresh = page(PROTOS)
    if not options.check:
        PAGE.write_text(fresh, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != fresh:
        print("docs/api.md is not what the protos give: python3 -m tools.apidoc", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
