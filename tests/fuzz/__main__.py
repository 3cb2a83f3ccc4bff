"""`make fuzz`: thousands of hostile calls to each service."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.attack import Findings, attack
from tests.fuzz.scene import SERVICES, scene


async def _run(count: int, seed: int, services: list[str], unlocked: bool) -> list[Findings]:
    with tempfile.TemporaryDirectory(prefix="turnout-fuzz-") as directory:
        async with scene(Path(directory), unlocked=unlocked) as place:
            return await attack(place, count, seed, lambda line: print(line, flush=True), *services)


def main() -> int:
    """Attack, and say what was found; exit code 1 if anything was."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--calls", type=int, default=10_000, help="calls to each service (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="brings an attack back; default: a new one, printed")
    parser.add_argument("--unlocked", action="store_true", help="the services ask for no token")
    parser.add_argument("services", nargs="*", choices=[*SERVICES, []], help="services to attack (default: all)")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    found = asyncio.run(_run(given.calls, seed, given.services or list(SERVICES), given.unlocked))
    for findings in found:
        for problem in findings.wrong:
            print(f"{findings.service}: {problem}")
    return 1 if any(findings.wrong for findings in found) else 0


if __name__ == "__main__":
    sys.exit(main())
