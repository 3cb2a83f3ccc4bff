"""`python -m tests.soak`: exit code 0 when nothing went wrong, 1 when something did."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.options import Rates, SoakOptions
from tests.soak.world import Soak


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen (default: 600)")
    parser.add_argument("--seed", type=int, help="where every choice comes from (default: drawn, and printed)")
    parser.add_argument("--durability", choices=("fsync", "os"), default="fsync", help="of the buffer (default: fsync)")
    parser.add_argument("--workers", type=int, default=8, help="worker processes (default: 8)")
    parser.add_argument("--faster", type=float, default=1.0, help="faults this many times as often (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object on stdout")
    parser.add_argument("--keep", type=Path, help="keep books and logs in this directory, which must not exist")
    given = parser.parse_args()
    directory = given.keep or Path(tempfile.mkdtemp(prefix="turnout-soak-"))
    directory.mkdir(parents=True, exist_ok=given.keep is None)
    seed = {} if given.seed is None else {"seed": given.seed}
    options = SoakOptions(
        directory=directory,
        seconds=given.seconds,
        durability=given.durability,
        workers=given.workers,
        rates=Rates().faster(given.faster),
        **seed,
    )
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    try:
        report = asyncio.run(Soak(options, lambda line: print(line, file=sys.stderr, flush=True)).run())
    finally:
        if given.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    print(report.to_text(), file=sys.stderr if given.json else sys.stdout)
    if given.json:
        print(json.dumps(report.to_json()))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
