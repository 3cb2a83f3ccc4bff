"""`turnout scheduler serve`."""

from __future__ import annotations

from services.cli.serve import serve_help
from services.runtime.options import settings_command
from services.runtime.process import run_service
from services.scheduler.service import NAME, builder
from services.scheduler.settings import SchedulerSettings


@settings_command(
    SchedulerSettings,
    name="serve",
    help=serve_help(
        "Run the switch scheduler until SIGTERM or Ctrl-C. Each run's OpenRun tells it where the run's buffer and "
        "engine controller are.",
        "turnout scheduler serve",
        "turnout scheduler serve --listen unix:/tmp/turnout-scheduler.sock",
    ),
)
def serve(settings: SchedulerSettings) -> int:
    """Run the service."""
    return run_service(NAME, settings, builder(settings))
