"""`turnout engine serve`."""

from __future__ import annotations

from services.cli.serve import serve_help
from services.engine.service import NAME, builder
from services.engine.settings import EngineSettings
from services.runtime.options import settings_command
from services.runtime.process import run_service


@settings_command(
    EngineSettings,
    name="serve",
    help=serve_help(
        "Run the engine controller of one run until SIGTERM or Ctrl-C; with --agent, the replicas of one node, which a "
        "controller elsewhere then uses.",
        "turnout engine serve",
        "turnout engine serve --agent --listen 127.0.0.1:0 --replica hybrid-0:hybrid --replica hybrid-1:hybrid",
    ),
)
def serve(settings: EngineSettings) -> int:
    """Run the service."""
    return run_service(NAME, settings, builder(settings))
