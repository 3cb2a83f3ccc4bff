"""`turnout token`: make the tokens that services ask for.

Invariant: a token is printed once, to stdout alone; what is kept of it is a hash.
"""

from __future__ import annotations

import secrets

import click
import yaml

from services.cli.examples import with_examples
from services.runtime.permissions import Role
from services.runtime.tokens import SECRET_BYTES, digest, is_token_id, make_token


@click.group(
    help=with_examples(
        "Tokens: what a caller may do. A service asks for them if it has --tokens-file.",
        "turnout token new --role reader --all-runs",
    ),
    no_args_is_help=True,
)
def token() -> None:
    """Hold the commands of tokens."""


@token.command(
    help=with_examples(
        "Make a token. Prints it to stdout, once, and the line for the tokens file of the services to stderr. Keep it "
        "in a file that only its bearer can read, and name that in TURNOUT_TOKEN_FILE.",
        "turnout token new --role worker --run my-run 2>>tokens.yaml >worker.token",
        "turnout token new --role service --all-runs --id scheduler",
    )
)
@click.option(
    "--role",
    required=True,
    type=click.Choice([str(role) for role in Role]),
    help="What its bearer is; see SECURITY.md.",
)
@click.option("--run", metavar="RUN", help="The only run that it is good for.")
@click.option("--all-runs", is_flag=True, help="It is good for every run, and for calls that name none.")
@click.option("--id", "token_id", metavar="ID", help="Its name in the file and in messages; default: a random one.")
def new(role: str, run: str | None, all_runs: bool, token_id: str | None) -> None:
    """Print a token, and what the services keep of it."""
    if (run is not None) == all_runs:
        raise click.UsageError("give either --run or --all-runs")
    token_id = token_id or f"{role}-{secrets.token_hex(4)}"
    if not is_token_id(token_id):
        raise click.UsageError("--id takes letters, digits, - and _, at most 64")
    made = make_token(token_id, secrets.token_urlsafe(SECRET_BYTES))
    scope = {"all_runs": True} if run is None else {"run": run}
    line = {"id": token_id, "role": role, **scope, "sha256": digest(made).hex()}
    click.echo(made)
    click.echo(yaml.safe_dump([line], sort_keys=False, default_flow_style=None, width=10_000).strip(), err=True)
