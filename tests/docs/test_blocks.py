"""Every command and snippet of the pages is executed: here, or where the table says, or it has a reason not to be."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs import given
from tests.docs.blocks import Piece, pieces, pieces_of
from tests.docs.how import NEEDS, Elsewhere, Never, Run, Shown, Stage
from tests.docs.pages import ROOT
from tests.docs.place import Place, Running, unavailable
from tests.docs.table import TABLE

WHY = unavailable()
PIECES = list(pieces())
OWN = {
    page: [
        (piece, how) for piece in PIECES if piece.page == page and isinstance(how := TABLE[page].get(piece.key), Run)
    ]
    for page in TABLE
}
"""What is executed here, by page."""

FILES = {
    "buffer.yaml": "log_level: error\n",
    "engine.yaml": given.ENGINE,
    "mine.jsonl": given.PROMPTS,
    "run.jsonl": given.VERL_METRICS,
}
JOB_S = 120


def _workloads() -> dict[str, str]:
    """Workload files as the pages ask for them."""
    (mine,) = (piece.text for piece in PIECES if piece.page == "docs/simulator.md" and piece.language == "yaml")
    splits = {"two-one": (4, 2, 255), "one-two": (2, 4, 510)}
    made = {"mine.yaml": mine}
    for name, (hybrid, standalone, step_s) in splits.items():
        text = re.sub(
            r"hybrid_replicas: 4, standalone_replicas: 2",
            f"hybrid_replicas: {hybrid}, standalone_replicas: {standalone}",
            mine,
        )
        made[f"{name}.yaml"] = text.replace("step_s: 255", f"step_s: {step_s}").partition("events:")[0]
    return made


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A machine on which nothing runs."""
    with Place(tmp_path_factory.mktemp("bare")) as place:
        yield place


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A machine with services, engines and a job that has ended, made with what the client's README shows."""
    with Place(tmp_path_factory.mktemp("job")) as place:
        folder = place.folder("scene")
        place.start("turnout up --data-dir data --run my-run --reference 1:1", folder).until(
            "turnout run my-run: hybrid-0, standalone-0", JOB_S
        )
        snippets = [
            (piece, how) for piece in PIECES if isinstance(how := TABLE.get(piece.page, {}).get(piece.key), Stage)
        ]
        (trainer, train), (worker, work) = snippets
        place.start(_snippet(worker, work.change, work.given, "", folder), folder)
        done = place.run(_snippet(trainer, train.change, train.given, "", folder), folder, JOB_S)
        assert done.returncode == 0, done.stdout
        for listen, replica in (
            (given.AGENT, "standalone-9:standalone"),
            ("0.0.0.0:50055 --insecure", "hybrid-7:hybrid"),
        ):
            agent = place.start(f"turnout engine serve --agent --listen {listen} --replica {replica}", folder)
            agent.until("listening on", JOB_S)
        assert place.run(f"cp -r data/buffer {given.STOPPED}", folder, 10).returncode == 0
        yield place


def _snippet(piece: Piece, change: Mapping[str, str], prelude: str, then: str, folder: Path) -> str:
    """Write a snippet into files and return the command that runs it."""
    number = len(list(folder.glob("snippet-*-page.py")))
    names = [f"snippet-{number}-{part}.py" for part in ("given", "page", "then")]
    for name, text in zip(names, (prelude, _changed(piece.text, change), then), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return " ".join(["python", "-m", "tests.docs.snippet", *names])


def _changed(text: str, change: Mapping[str, str]) -> str:
    for old, new in change.items():
        assert old in text, f"{old!r} is not in {text!r}"
        text = text.replace(old, new)
    return text


def _lacks(need: str) -> bool:
    return bool(need) and find_spec(need) is None and not (ROOT / need).exists()


def _carry_out(piece: Piece, how: Run, place: Place, folder: Path) -> Running | None:
    """Run one piece as its line in the table says; returns what goes on beside the rest."""
    if piece.language == "sh":
        command = _changed(piece.key, how.change) + (f" {how.add}" if how.add else "")
    else:
        command = _snippet(piece, how.change, how.given, how.then, folder)
    if how.add and " > " in piece.key:
        command = _changed(piece.key, {" > ": f" {how.add} > "})
    if how.before:
        assert place.run(how.before, folder, how.timeout_s).returncode == 0
    if how.until:
        running = place.start(command, folder)
        running.until(how.until, how.timeout_s)
        if not how.ends:
            return running
        # Some commands say with their code that they were interrupted.
        assert running.stop() in (0, 128 + signal.SIGINT, -signal.SIGINT), command
        return None
    done = place.run(command, folder, how.timeout_s)
    assert done.returncode == how.code, f"{piece.page}: {command}\n{done.stdout[-4000:]}"
    assert re.search(how.prints, done.stdout), f"{piece.page}: {command}\n{done.stdout[-4000:]}"
    return None


def _page_works(page: str, slow: bool, request: pytest.FixtureRequest) -> None:
    if WHY is not None:
        pytest.skip(WHY)
    left_out: set[str] = set()
    folders: dict[str, Path] = {}
    running: list[Running] = []
    for piece, how in OWN[page]:
        if _lacks(how.needs):
            left_out.add(how.needs)
        elif slow or not how.slow:
            while how.alone and running:
                running.pop().stop()
            place: Place = request.getfixturevalue(how.scene)
            if how.scene not in folders:
                folders[how.scene] = place.folder(f"{page.replace('/', '-')}-{'slow' if slow else 'fast'}")
                for name, text in (FILES | _workloads()).items():
                    (folders[how.scene] / name).write_text(text, encoding="utf-8")
            if (going_on := _carry_out(piece, how, place, folders[how.scene])) is not None:
                running.append(going_on)
    for one in running:
        one.stop()
    if left_out:
        pytest.skip(f"left out what needs {', '.join(sorted(left_out))}: make {NEEDS[min(left_out)]} has it")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page, own in OWN.items() if any(not how.slow for _, how in own)])
def test_what_the_page_shows_works(page: str, request: pytest.FixtureRequest) -> None:
    """A page that teaches a command which fails costs its reader more than no page."""
    _page_works(page, False, request)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", [page for page, own in OWN.items() if any(how.slow for _, how in own)])
def test_what_takes_longer_works_too(page: str, request: pytest.FixtureRequest) -> None:
    """As above, with what is left out there."""
    _page_works(page, True, request)


def test_every_piece_has_its_line_in_the_table_and_every_line_its_piece() -> None:
    """What is in no table is executed by nobody, and nobody knows."""
    there = {(piece.page, piece.key) for piece in PIECES}
    known = {(page, key) for page, lines in TABLE.items() for key in lines}
    assert len(there) > 100
    assert sorted(there - known) == []
    assert sorted(known - there) == []


def test_a_new_command_is_found_in_each_way_of_writing_it() -> None:
    """The test above passes over what it does not see."""
    page = "a\n\n    turnout one   # for\n    turnout two \\\n        --with more\n\nb\n\n"
    page += "1. c:\n\n    ```sh\n    turnout three\n    ```\n"
    found = [piece.key for piece in pieces_of("p", page + "\n```python\nimport x\n\nx.y()\n```\n\n    turnout four\n")]
    assert found == ["turnout one", "turnout two --with more", "turnout three", "x.y()", "turnout four"]


def test_what_is_executed_elsewhere_names_a_test_and_a_target_that_exist() -> None:
    """A test that was renamed executes nothing."""
    makefile = (ROOT / "Makefile").read_text()
    for page, lines in TABLE.items():
        for key, how in lines.items():
            if not isinstance(how, Elsewhere):
                continue
            assert re.search(rf"^{how.make}:", makefile, re.MULTILINE), (page, key)
            path, _, name = how.test.partition("::")
            assert not path or f"def {name}(" in (ROOT / path).read_text(), (page, key)


def test_what_needs_another_environment_is_run_in_it() -> None:
    """Left out in one environment and never run in another is never run."""
    targets = dict(re.findall(r"^([\w-]+):[^\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    needs = {how.needs for own in OWN.values() for _, how in own if how.needs} - {"node_modules"}
    assert needs
    assert [need for need in needs if "tests/docs" not in targets[NEEDS[need]]] == []


def test_reasons_are_given() -> None:
    """The rest has to be little, and what it is."""
    never = [how.reason for lines in TABLE.values() for how in lines.values() if isinstance(how, Never)]
    shown = [how.what for lines in TABLE.values() for how in lines.values() if isinstance(how, Shown)]
    assert all(never)
    assert all(shown)
    assert len(never) < 0.1 * len(PIECES)
