"""A service as a process: event loop, logs, signals, exit codes, and the lines that scripts read.

Invariants: stdout carries one line for each address, printed once the service is ready, and nothing else; the first
SIGTERM or SIGINT stops in order, a second one ends the process at once; exit code 0 after a stop in order, 1 otherwise.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from typing import Final

import uvloop

from services.runtime.allocator import keep_freed_memory, returning_holes
from services.runtime.collector import short_collections
from services.runtime.config import ServiceSettings
from services.runtime.host import Build, ServiceHost, StartError
from services.runtime.logs import get_logger, setup_logs
from services.runtime.open_files import raise_open_files
from services.runtime.tracing import TracingError, export_traces

EXIT_FAILED: Final = 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run_service(name: str, settings: ServiceSettings, build: Build) -> int:
    """Run a service until a signal stops it; return the exit code of the process."""
    setup_logs(settings.log_level, settings.log_format)
    if settings.traces:
        try:
            finish = export_traces(name)
        except TracingError as error:
            print(f"turnout {name}: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILED
        atexit.register(finish)
    keep_freed_memory()
    raise_open_files()
    with (
        short_collections(),
        returning_holes(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(name, settings, build))


async def _serve(name: str, settings: ServiceSettings, build: Build) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            # State is safe at any instant; only the calls at work lose their answers.
            os._exit(128 + number)
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    log = get_logger(name)
    host = ServiceHost(name, settings, build)
    start, asked = asyncio.ensure_future(host.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait((start, asked), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return 0
    try:
        start.result()
    except StartError as error:
        print(f"turnout {name}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except Exception:
        log.exception("could not start")
        print(f"turnout {name}: could not start, see the log", file=sys.stderr, flush=True)
        return EXIT_FAILED
    for target in host.targets:
        print(f"turnout {name} listening on {target}", flush=True)
    if host.metrics_url:
        print(f"turnout {name} metrics on {host.metrics_url}", flush=True)
    await asked
    log.info("stopping", grace_s=settings.grace_s)
    in_order = await host.stop()
    log.info("stopped", in_order=in_order)
    return 0 if in_order else EXIT_FAILED
