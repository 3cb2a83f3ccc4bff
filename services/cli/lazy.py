"""A command group that imports a command only when it runs.

Invariants: the help of a group and a wrong command name import nothing but click, so they answer at once; an unknown
command names the one that was probably meant.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is, and its line in the help of its group."""

    place: str
    """`module:attribute` of a click command."""

    summary: str


class LazyGroup(click.Group):
    """A group over entries."""

    def __init__(self, *args: Any, entries: Mapping[str, Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entries = dict(entries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given: what one needs first comes first."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one, say which was probably meant."""
        name = args[0]
        if name not in self._entries and not name.startswith("-"):
            close = difflib.get_close_matches(name, list(self._entries), n=1)
            hint = f" Did you mean '{close[0]}'?" if close else f" There are: {', '.join(self._entries)}."
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])
