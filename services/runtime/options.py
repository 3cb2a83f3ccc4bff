"""A settings model as the options of a command.

Invariants: each field is one option with the field's own description, so a command teaches from the model that
validates it; options only collect text, the model alone judges it; a wrong configuration ends with exit code 2 and one
line for each problem on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from services.runtime.config import (
    CONFIG_VARIABLE,
    ConfigError,
    ServiceSettings,
    is_list,
    leaves,
    load_settings,
    variable,
)

S = TypeVar("S", bound=ServiceSettings)

EXIT_USAGE: Final = 2
"""As for any wrong command line."""


def settings_command(
    settings_class: type[S], *, name: str, help: str
) -> Callable[[Callable[[S], int | None]], click.Command]:
    """Make a command of a function that takes the settings and returns an exit code (None: 0)."""

    def decorate(function: Callable[[S], int | None]) -> click.Command:
        fields = {"_".join(path): path for path, _ in leaves(settings_class)}

        def callback(config: Path | None, **options: Any) -> None:
            settings = settings_or_exit(settings_class, _as_flags(fields, options), config)
            click.get_current_context().exit(function(settings) or 0)

        parameters: list[click.Parameter] = [
            _option(settings_class, path, field) for path, field in leaves(settings_class)
        ]
        config_option = click.Option(
            ["--config"],
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"YAML file with any of these settings.  [env: {CONFIG_VARIABLE}]",
        )
        return click.Command(name, callback=callback, params=[config_option, *parameters], help=help)

    return decorate


def settings_or_exit(settings_class: type[S], flags: dict[str, Any], config: Path | None) -> S:
    """Load the settings; on a wrong configuration print its problems and exit with code 2."""
    try:
        return load_settings(settings_class, flags=flags, config=config)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(f"configuration: {problem}", err=True)
        click.get_current_context().exit(EXIT_USAGE)


def _option(settings_class: type[ServiceSettings], path: tuple[str, ...], field: FieldInfo) -> click.Option:
    words = "-".join(path).replace("_", "-")
    name = "_".join(path)
    notes = [f"env: {variable(settings_class, path)}"]
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    if isinstance(default, list):
        default = ", ".join(map(str, default))
    if default is not None and not isinstance(default, SecretStr):
        notes.insert(0, f"default: {'on' if default is True else 'off' if default is False else default}")
    help_text = f"{field.description or ''}  [{'; '.join(notes)}]"
    if field.annotation is bool:
        return click.Option([f"--{words}/--no-{words}", name], default=None, help=help_text)
    return click.Option([f"--{words}", name], multiple=is_list(field), metavar=_metavar(field), help=help_text)


def _metavar(field: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kinds[0], "TEXT")


def _as_flags(fields: dict[str, tuple[str, ...]], options: dict[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value == ():
            continue
        place = flags
        *outer, last = fields[name]
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    return flags
