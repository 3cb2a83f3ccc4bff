"""Where a command finds the three services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

BUFFER: Final = "127.0.0.1:50051"
ENGINE: Final = "127.0.0.1:50052"
SCHEDULER: Final = "127.0.0.1:50053"
"""The defaults of the services themselves."""

# Not TURNOUT_BUFFER_...: that prefix belongs to the settings of the service.
_VARIABLE: Final = "TURNOUT_TARGET_{}"


def target_option(name: str, default: str) -> Callable[[F], F]:
    """Add an option for the gRPC target of a service."""
    return click.option(
        f"--{name}",
        metavar="TARGET",
        default=default,
        show_default=True,
        envvar=_VARIABLE.format(name.upper()),
        show_envvar=True,
        help=f"gRPC target of the {name}: host:port or unix:path.",
    )
