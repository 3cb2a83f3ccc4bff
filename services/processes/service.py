"""A service as a child process: `turnout <service> serve`."""

from __future__ import annotations

from services.processes.child import ChildSpec


def service_spec(service: str, *arguments: str, name: str | None = None) -> ChildSpec:
    """Return how to start `buffer`, `engine` or `scheduler` with these arguments."""
    return ChildSpec(name or service, "services.cli.main", (service, "serve", *arguments))
