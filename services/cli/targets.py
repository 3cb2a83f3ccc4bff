"""Where a command finds the three services, and how it shows who it is."""

from __future__ import annotations

import os
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


_SECURITY: Final = {
    "ca": ("FILE", "Authorities that vouch for the services, which are then called over TLS; 'system': gRPC's own."),
    "cert": ("FILE", "The command's own certificate, for mutual TLS."),
    "key": ("FILE", "Its private key."),
    "server-name": ("NAME", "Name that the certificates of the services must bear, if not the host of the target."),
    "token-file": ("FILE", "File with the token to show. The token itself can be in TURNOUT_TOKEN, never in a flag."),
}


def security_options(function: F) -> F:
    """Add the options of TLS and the token. They count for every client that the command makes."""

    def remember(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            # Where clients look, in this process and in those that it starts.
            os.environ[_security_variable(str(option.name))] = value

    for name, (metavar, text) in reversed(_SECURITY.items()):
        add = click.option(
            f"--{name}",
            metavar=metavar,
            envvar=_security_variable(name),
            show_envvar=True,
            expose_value=False,
            callback=remember,
            help=text,
        )
        function = add(function)
    return function


def forget_security() -> None:
    """Call services plainly, whatever the environment says: for what starts its own on loopback."""
    for name in (*_SECURITY, "token"):
        os.environ.pop(_security_variable(name), None)


def _security_variable(name: str) -> str:
    return f"TURNOUT_{name.replace('-', '_').upper()}"
