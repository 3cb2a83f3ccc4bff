"""`turnout buffer own`: deletes in an external payload store what the buffer lets go.

Invariant: exit code 0 without Ctrl-C says that the run is gone and everything it let go in that store is deleted.
"""

from __future__ import annotations

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.targets import BUFFER, security_options, target_option
from turnout.client import TurnoutError
from turnout.stores import StoreOwner, open_store


@click.command(
    "own",
    help=with_examples(
        "Delete in an external payload store what the buffer lets go, until the run is deleted and all of it is gone, "
        "or until Ctrl-C. Trainers do this for their own stores; the command is for what they left, and for trainers "
        "that do not use the hooks.",
        "turnout buffer own my-run s3://bucket/payloads",
        "turnout buffer own my-run ray --buffer trainer-0:50051",
    ),
)
@click.argument("run_id", metavar="RUN")
@click.argument("store", metavar="STORE")
@target_option("buffer", BUFFER)
@security_options
def buffer_own(run_id: str, store: str, buffer: str) -> None:
    """Own a store."""
    try:
        opened = open_store(store)
    except TurnoutError as error:
        raise CommandFailed(error.message) from error
    owner = StoreOwner(buffer, run_id, opened)
    try:
        click.echo(f"deleting in {store} what {run_id} lets go; Ctrl-C ends it", err=True)
        owner.start()
        owner.join()
    finally:
        owner.stop()
        opened.close()
        click.echo(f"{owner.deleted} payloads of {run_id} deleted in {store}")
