"""`turnout buffer|engine|scheduler serve`: one service in this process, and what else concerns one service.

Invariants: each service is imported only by its own command; its options, environment variables and YAML keys come from
its own settings model.
"""

from __future__ import annotations

from typing import Final

import click

from services.cli.examples import with_examples
from services.cli.lazy import Entry, LazyGroup


def _group(name: str, what: str, **more: Entry) -> LazyGroup:
    entries = {"serve": Entry(f"services.cli.serve_{name}:serve", f"Run the {what} until SIGTERM or Ctrl-C."), **more}
    return LazyGroup(name, entries=entries, help=f"The {what}.", no_args_is_help=True)


def serve_help(text: str, *examples: str) -> str:
    """Return the help of a `serve` command."""
    body = (
        f"{text}\n\nPrints one line per address once it is ready. Values come from flags, then TURNOUT_* variables, "
        "then the YAML file, then defaults; an unknown key is an error."
    )
    return with_examples(body, *examples)


buffer: Final[click.Command] = _group(
    "buffer",
    "replay buffer",
    audit=Entry("services.cli.buffer_audit:buffer_audit", "Account for every group, from a data directory."),
    own=Entry("services.cli.buffer_own:buffer_own", "Delete in an external payload store what the buffer lets go."),
)
engine: Final[click.Command] = _group(
    "engine",
    "engine controller, or with --agent the replicas of one node",
    register=Entry("services.cli.engine_register:engine_register", "Make replicas known to a run's controller."),
)
scheduler: Final[click.Command] = _group("scheduler", "switch scheduler")
