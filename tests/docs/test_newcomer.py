"""The way of a newcomer: README and quickstart, literally, from a fresh clone on a machine that has nothing yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.docs.blocks import pieces
from tests.docs.pages import ROOT
from tests.docs.place import Place, Running, unavailable

WORKER = "examples/any_worker.py"
WAITED_S = 1800
LISTENS = "turnout run my-run: hybrid-0, standalone-0"


def _typed(command: str, folder: Path) -> Running:
    """Type a command of the page into a terminal that knows nothing of this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    environment = kept | {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "160"}
    process = subprocess.Popen(
        ["script", "--quiet", "--return", "--flush", "--command", command, "/dev/null"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Running(process)


@pytest.mark.slow
@pytest.mark.timeout(2 * WAITED_S)
def test_the_quickstart_works_from_a_fresh_clone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A first page that fails, or takes half an hour, is the last one that is read.

    Prints how long it took until a lend was seen, and until an own worker talked to the services. These are wall times
    of this machine under its load, so they are no assertion.
    """
    if (why := unavailable()) is not None:
        pytest.skip(why)
    if shutil.which("git") is None:
        pytest.skip("it needs git")
    if shutil.which("script") is None:
        pytest.skip("it needs script, of util-linux")
    commands = [piece.key for piece in pieces() if piece.page == "docs/quickstart.md"]
    demo, up, worker, torch, trainer, *looking = commands
    began = time.monotonic()

    def say(what: str) -> None:
        with capsys.disabled():
            print(f"\n{time.monotonic() - began:7.1f} s  {what} (load {os.getloadavg()[0]:.1f})", end="")

    clone = tmp_path / "turnout"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True, timeout=300)
    say("cloned")
    running = _typed(demo, clone)
    try:
        running.until("starting processes|step 1", WAITED_S)
        say("installed, the demo begins")
        # Of its own accord: the lend that starts every run is over in step 2.
        running.until(r"(?s)switching on.*step [2-9]: [^,]*, GPUs lent", WAITED_S)
        say("the first lend is seen")
        running.ends(WAITED_S)
        say("the demo has ended")
    finally:
        running.stop()

    with Place(tmp_path / "place") as place:
        place.start(up, clone).until(LISTENS, WAITED_S)
        say("the services run")
        # `reward` is the reader's to change, so it is changed.
        source = (clone / WORKER).read_text()
        assert "token % 2 == 0" in source
        (clone / WORKER).write_text(source.replace("token % 2 == 0", "token % 3 == 0"))
        own: Running = place.start(worker, clone)
        _typed(torch, clone).ends(WAITED_S)
        say("torch is installed")
        done = place.run(trainer, clone, WAITED_S)
        assert done.returncode == 0, done.stdout
        rewards = [float(text) for text in re.findall(r"reward (0\.\d+)", done.stdout)]
        assert len(rewards) == 20
        assert all(0.2 < reward < 0.45 for reward in rewards), "graded by another worker than the reader's own"
        say("an own worker has served an own trainer")
        for command in looking:
            shown = place.run(command, clone, WAITED_S)
            assert shown.returncode == 0, shown.stdout
        say("looked at it")
        assert (clone / "report.html").exists()
        assert own.stop() != 1
