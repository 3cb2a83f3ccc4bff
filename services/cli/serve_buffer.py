"""`turnout buffer serve`."""

from __future__ import annotations

from services.buffer.service import NAME, BufferService
from services.buffer.settings import BufferSettings
from services.cli.serve import serve_help
from services.runtime.options import settings_command
from services.runtime.process import run_service


@settings_command(
    BufferSettings,
    name="serve",
    help=serve_help(
        "Run the replay buffer until SIGTERM or Ctrl-C.",
        "turnout buffer serve",
        "turnout buffer serve --data-dir /var/lib/turnout/buffer --durability fsync",
        "turnout buffer serve --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:9100",
    ),
)
def serve(settings: BufferSettings) -> int:
    """Run the service."""
    return run_service(NAME, settings, lambda context: BufferService(context, settings))
