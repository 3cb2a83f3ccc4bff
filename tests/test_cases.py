"""Keeps docs/cases.md honest: every case is tested by name, or its row says why not."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| H(\d\d) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"def test_h(\d\d)_", re.IGNORECASE)


def rows() -> dict[str, str]:
    return {number: status.strip() for number, status in ROW.findall((ROOT / "docs/cases.md").read_text())}


def named_tests() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for number in TEST.findall(path.read_text()):
            found.setdefault(number, set()).add(path.relative_to(ROOT).parts[1])
    return found


def test_every_case_has_a_row() -> None:
    assert sorted(rows()) == [f"{number:02}" for number in range(1, 62)]


def test_rows_say_where_the_tests_are() -> None:
    """A row names the folders of tests/ that hold tests of its case, no more and no fewer; the others give a reason."""
    found = named_tests()
    for number, status in rows().items():
        stated = set(re.findall(r"`([a-z_]+)`", status)) if status.startswith("tested in ") else set()
        assert stated == found.get(number, set()), f"H{number}: the row says {stated}, tests are in {found.get(number)}"
        assert stated or status.startswith(("does not apply: ", "later: ")), f"H{number} says neither where nor why not"
