"""What became of every result that a buffer acknowledged to a worker: the audit of a job whose processes were killed.

Invariants: it compares three books that know nothing of each other: what workers were told, what the trainer read, and
the buffer's ledger. A worker that is killed tells less than it was told, never more. A group with an attempt that
failed is evicted with what it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.ray_deploy.crew import Crew


def discrepancies(crew: Crew, ledger: dict[str, Any], group_size: int) -> list[str]:
    """What does not fit together, a sentence each; none of it may. `ledger` is the one that the trainer told last."""
    trained: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for _, line in crew.said("group_trained"):
        trained.setdefault(line["group_id"], set()).add((line["digest"], tuple(line["tokens"])))
    acknowledged = [line for worker in crew.workers for _, line in worker.lines if line["event"] == "acknowledged"]
    return [
        *_of_the_ledger(ledger, trained),
        *(f"group {group} was read with {len(read)} contents" for group, read in trained.items() if len(read) > 1),
        *_of_the_workers(acknowledged, trained, (ledger["present"] + ledger["evicted"]) * group_size),
    ]


def _of_the_ledger(ledger: dict[str, Any], trained: dict[str, Any]) -> Iterable[str]:
    added, committed, evicted, present = (ledger[name] for name in ("added", "committed", "evicted", "present"))
    if added != committed + evicted + present:
        yield f"the ledger does not balance: {ledger}"
    if committed != len(trained):
        yield f"{committed} groups were committed, {len(trained)} were trained on"


def _of_the_workers(
    acknowledged: list[dict[str, Any]], trained: dict[str, set[tuple[str, tuple[int, ...]]]], room: int
) -> Iterable[str]:
    times = Counter((line["group_id"], line["index"]) for line in acknowledged)
    for (group, index), count in times.items():
        if count > 1:
            yield f"trajectory {index} of {group} was acknowledged {count} times"
    waiting = 0
    for line in acknowledged:
        read = trained.get(line["group_id"])
        if read is None:
            waiting += 1
        elif any(tokens[line["index"]] != line["tokens"] for _, tokens in read):
            yield f"trajectory {line['index']} of {line['group_id']} was read with other tokens than were acknowledged"
    if waiting > room:
        yield f"{waiting} acknowledged trajectories were not trained on, and the groups left have {room}"
