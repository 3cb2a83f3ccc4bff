"""What the processes of the load bench have in common: one errand, one end, one last word.

Invariants: SIGTERM ends the work in order; the last line on stdout is a JSON object of the kind `done`; a warning that
the client logs is an error of the bench, since nothing fails in it on purpose.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from services.bench.load_plan import Errand

ELSEWHERE: Final = 10
"""Niceness of what runs on machines of its own in a deployment: here it gets what the services leave."""

KEPT: Final = 5
"""Messages that are told; all are counted."""


@dataclass(slots=True)
class Errors:
    """What went wrong."""

    count: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Take one down."""
        self.count += 1
        if len(self.messages) < KEPT:
            self.messages.append(message)


class _Listening(logging.Handler):
    def __init__(self, errors: Errors) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.add(record.getMessage())


def tell(kind: str, **what: Any) -> None:
    """Say something to the bench."""
    print(json.dumps({"kind": kind, **what}), flush=True)


def run_errand(
    work: Callable[[Errand, asyncio.Event, Errors], Awaitable[dict[str, Any]]], *, niceness: int = 0
) -> None:
    """Do the work of this process until SIGTERM; what it returns is told last, with the errors."""
    os.nice(niceness)
    errand, errors = Errand.from_argument(sys.argv[1]), Errors()
    logger = logging.getLogger("turnout")
    logger.addHandler(_Listening(errors))
    logger.propagate = False

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        told = await work(errand, stop, errors)
        tell("done", errors=errors.count, messages=errors.messages, **told)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
