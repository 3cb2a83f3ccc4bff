"""`turnout buffer audit`: what became of every group, from a data directory.

Invariants: it refuses a directory that a service has open; exit code 0 says that every group is accounted for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from services.buffer.domain.dropped import DroppedPrompt
from services.buffer.storage.audit import PartitionAudit, audit
from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.runtime.errors import TurnoutError


@click.command(
    "audit",
    help=with_examples(
        "Print the ledger of every partition from the data directory of a replay buffer that is stopped: groups ever "
        "added = committed + evicted + present. The journal is read and verified as at a start of the service.",
        "turnout buffer audit --data-dir /var/lib/turnout/buffer",
        "turnout buffer audit --data-dir /var/lib/turnout/buffer --json",
    ),
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    help="The --data-dir of the buffer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def buffer_audit(data_dir: Path, as_json: bool) -> None:
    """Print the ledger."""
    try:
        found = run_async(audit(data_dir))
    except TurnoutError as error:
        raise CommandFailed(str(error)) from error
    if as_json:
        click.echo(
            json.dumps(
                {
                    "position": found.position,
                    "lost": found.lost,
                    "balanced": found.balanced,
                    "partitions": [_to_dict(partition) for partition in found.partitions],
                }
            )
        )
    else:
        click.echo(f"{found.position} records" + (f", {found.lost} lost to a stop of the machine" * bool(found.lost)))
        for partition in found.partitions:
            click.echo(_line(partition))
            for prompt in partition.dropped:
                click.echo(f"  {_dropped_line(prompt)}")
    if not found.balanced:
        raise CommandFailed("the ledger does not balance")


def _to_dict(found: PartitionAudit) -> dict[str, Any]:
    ledger, there = found.ledger, found.ledger.present
    return {
        "run_id": found.run_id,
        "partition": found.partition,
        "epoch": found.epoch,
        "step": found.step,
        "added": ledger.added,
        "committed": ledger.committed,
        "evicted": ledger.evicted,
        "evicted_by_reason": {reason.name.lower(): count for reason, count in ledger.evicted_by_reason.items()},
        "present": {
            "pending": there.pending,
            "running": there.running,
            "finished": there.finished,
            "failed": there.failed,
            "sampled": there.sampled,
        },
        "credits": {
            "created": ledger.credits_created,
            "paid": ledger.credits_paid,
            "cancelled": ledger.credits_cancelled,
        },
        "balanced": ledger.balanced,
        "dropped_prompts": [asdict(prompt) for prompt in found.dropped],
    }


def _dropped_line(prompt: DroppedPrompt) -> str:
    times = f"{prompt.least} times" if not prompt.overcount else f"{prompt.least} to {prompt.dropped} times"
    return (
        f"{prompt.prompt_id}: dropped {times} and not trained on since ({prompt.stale} stale, {prompt.failed} failed); "
        f"last as {prompt.group_id}, born at step {prompt.born}, dropped at step {prompt.step}, longest trajectory "
        f"{prompt.length}, attempt {prompt.attempt}"
    )


def _line(found: PartitionAudit) -> str:
    shown = _to_dict(found)
    reasons = ", ".join(f"{count} {reason}" for reason, count in shown["evicted_by_reason"].items())
    present = ", ".join(f"{count} {state}" for state, count in shown["present"].items() if count)
    credits = shown["credits"]
    return (
        f"{found.run_id} / {found.partition} (epoch {found.epoch}, step {found.step}): "
        f"{shown['added']} added = {shown['committed']} committed + {shown['evicted']} evicted"
        f"{f' ({reasons})' if reasons else ''} + {found.ledger.present.present} present"
        f"{f' ({present})' if present else ''}; refill credits: {credits['created']} created, {credits['paid']} paid, "
        f"{credits['cancelled']} cancelled"
    )
