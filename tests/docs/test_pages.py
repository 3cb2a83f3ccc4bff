"""True documentation: its commands exist with their options, its links lead somewhere, its reasons are given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from services.cli.main import cli
from tests.docs.pages import PAGES, ROOT, anchors, code_lines

COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv\S*/bin/)?(turnout .+)$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
REASON = re.compile(r"`([A-Z]+(?:_[A-Z]+)+)`")


def commands() -> list[tuple[str, list[str]]]:
    """Return every `turnout` command of the pages, without what a shell does with it."""
    return [
        (line.page, arguments(match[1]))
        for line in code_lines()
        if (match := COMMAND.match(line.text)) and not match[1].startswith("turnout run ")
    ]


def arguments(command: str) -> list[str]:
    # Two blanks begin what a page says about the command.
    words = shlex.split(re.split(r"\s{2,}|\s#|\s[|>&]", command)[0])
    return words[1:]


def parse(command: click.Command, words: list[str]) -> None:
    """Parse a command line as click would, down to the last subcommand. Raises click.UsageError."""
    context = click.Context(command, info_name=command.name)
    if isinstance(command, click.Group):
        options = command.make_parser(context).parse_args(list(words))
        rest = options[1]
        if not rest:
            return
        chosen = command.get_command(context, rest[0])
        if chosen is None:
            raise click.UsageError(f"no such command: {rest[0]}")
        parse(chosen, rest[1:])
    else:
        command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_every_command_of_the_pages_exists_with_its_options(page: str, words: list[str]) -> None:
    """A renamed option leaves pages that teach a command which fails."""
    try:
        parse(cli, words)
    except click.UsageError as error:
        pytest.fail(f"{page}: turnout {' '.join(words)}: {error.message}")


def test_the_commands_are_found() -> None:
    """The test above passes where none is found."""
    assert len(commands()) > 50
    with pytest.raises(click.UsageError):
        parse(cli, ["report", "my-run", "--no-such-option"])
    with pytest.raises(click.UsageError):
        parse(cli, ["no-such-command"])


def test_every_make_target_of_the_pages_exists() -> None:
    """As for the commands."""
    targets = set(
        re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text().replace("$(VLLM)", ".venv-vllm"), re.M)
    )
    named = {
        (line.page, target)
        for line in code_lines()
        if (match := re.match(r"make ([\w./-]+)", line.text))
        for target in [match[1]]
    }
    assert named
    assert {(page, target) for page, target in named if target not in targets} == set()


def _links() -> list[tuple[Path, str]]:
    return [(page, link) for page in PAGES for link in LINK.findall(page.read_text()) if "://" not in link]


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    """A page that moved leaves links into nothing."""
    broken = []
    for page, link in _links():
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # The site has files from outside of docs/, but no folders.
        outside = target.is_dir() and (ROOT / "docs") in page.parents
        if not target.exists() or outside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_links_to_the_repository_name_what_is_there() -> None:
    """The site links to sources by their address."""
    tree = re.compile(r"https://github.com/turnout-rl/turnout/(?:tree|blob)/main/([\w./-]+)")
    named = [(page, path) for page in PAGES for path in tree.findall(page.read_text())]
    assert named
    assert [(page.name, path) for page, path in named if not (ROOT / path).exists()] == []


def test_reasons_by_symptom_are_reasons_that_services_give() -> None:
    """Someone looks up what the error said."""
    known = (ROOT / "docs" / "api.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    reasons = set(REASON.findall((ROOT / "docs" / "troubleshooting.md").read_text()))
    assert len(reasons) > 5
    assert {reason for reason in reasons if reason not in known and f'"{reason}"' not in sources} == set()


def test_all_pages_are_listed() -> None:
    """A page that nothing links to is not read."""
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [page for page in PAGES if (ROOT / "docs") in page.parents and page.name not in ("index.md", "contents.md")]
    assert [page.name for page in pages if f"({page.relative_to(ROOT / 'docs')})" not in index] == []


def test_the_site_lists_each_page_once() -> None:
    """Sphinx refuses a page that is in no list, and one that is in two stands twice in the sidebar."""
    docs = ROOT / "docs"
    blocks = re.findall(r"^```{toctree}\n(?::.+\n)*\n([^`]*)```", (docs / "contents.md").read_text(), re.MULTILINE)
    listed = sorted("\n".join(blocks).split())
    pages = [str(page.relative_to(docs).with_suffix("")) for page in PAGES if docs in page.parents]
    assert listed == sorted(page for page in pages if page not in ("index", "contents"))


def test_a_line_is_read_as_a_shell_reads_it() -> None:
    """Comments, continuations and redirections are no arguments."""
    assert arguments("turnout events my-run > my-run.jsonl") == ["events", "my-run"]
    assert arguments("turnout up    the three services") == ["up"]
