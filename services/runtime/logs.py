"""Structured logs on stderr: for people on a terminal, as JSON elsewhere.

Invariants: stdout is left to machine-readable lines; values under keys that look like secrets are never written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

_SECRET_WORDS: Final = ("authorization", "password", "secret", "auth_token", "api_key", "credential")


def _mask_secrets(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in event:
        if any(word in key.lower() for word in _SECRET_WORDS):
            event[key] = "***"
    return event


def setup_logs(level: str = "info", fmt: str = "auto") -> None:
    """Configure the logs of this process. `fmt`: `json`, `console`, or `auto` = console on a terminal, else JSON."""
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _mask_secrets,
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger whose lines say which part of the program speaks."""
    return cast(FilteringBoundLogger, structlog.get_logger(part=name))
