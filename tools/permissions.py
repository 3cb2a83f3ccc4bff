"""The table of who may make which call, at the end of docs/security.md.

python3 -m tools.permissions
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.runtime.permissions import PERMISSIONS, Role

PAGE: Final = Path(__file__).parents[1] / "docs" / "security.md"
_HEAD: Final = "| service | call | for |\n| --- | --- | --- |\n"


def table() -> str:
    """The table, one line a call."""
    lines = []
    for path, roles in PERMISSIONS.items():
        _, service, call = path.split("/")
        who = "all" if roles == frozenset(Role) else ", ".join(role for role in Role if role in roles)
        lines.append(f"| {service.rpartition('.')[2]} | {call} | {who} |\n")
    return _HEAD + "".join(lines)


def page(text: str) -> str:
    """The page with the table as it is now; the table is its end."""
    return text.partition(_HEAD)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
