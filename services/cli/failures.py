"""What can go wrong in a command, and how it ends: one or a few lines on stderr and an exit code, never a traceback.

Exit codes: 0 done; 1 it failed; 2 the command line or the configuration is wrong; 130 it was interrupted (Ctrl-C).
"""

from __future__ import annotations

from typing import Final

import click

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""


class CommandFailed(click.ClickException):
    """The command could not do its work; `details` are printed below the message."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.details = details or []

    def show(self, file: object = None) -> None:
        """Print the message and its details to stderr."""
        click.echo(f"turnout: {self.message}", err=True)
        for line in self.details:
            click.echo(f"  {line}", err=True)


class Misconfigured(CommandFailed):
    """What the user gave cannot be used: a file, an address, a name."""

    exit_code = EXIT_USAGE
