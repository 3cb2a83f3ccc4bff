"""What became of every group of a run that was loaded.

Invariants: a group that was acknowledged as added was handed to the trainer once, or was evicted with a reason, or is
still there; nobody got one that was never added; events have no gap; the counts of the buffer's own ledger are those of
the ids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient

_PAGE: Final = 1000
_NAMED: Final = 5
"""Ids that a fault names."""


@dataclass(slots=True)
class RunLedger:
    """All that is known of the groups of a run, from three sides."""

    run_id: str
    acknowledged: set[str] = field(default_factory=set)
    """The trainer was told that they were added."""
    sampled: Counter[str] = field(default_factory=Counter)
    """How often the trainer got each."""
    committed: set[str] = field(default_factory=set)
    """The trainer was told that they were committed."""
    added: set[str] = field(default_factory=set)
    """By the buffer's events; those of refills too."""
    evicted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By the buffer's events, with the reasons."""
    gaps: int = 0
    """Events that were missing."""
    sequence: int = 0
    """Of the last event."""
    present: set[str] = field(default_factory=set)
    """Listed by the buffer at the end."""
    counts: buffer_pb2.GetLedgerResponse = field(default_factory=buffer_pb2.GetLedgerResponse)
    """The buffer's own ledger at the end."""

    def note(self, fate: str, ids: Iterable[str]) -> None:
        """Take what the trainer wrote down."""
        if fate == "added":
            self.acknowledged.update(ids)
        elif fate == "sampled":
            self.sampled.update(ids)
        elif fate == "committed":
            self.committed.update(ids)

    def take(self, event: buffer_pb2.GroupEvent) -> None:
        """Take an event of the buffer."""
        if not event.sequence:
            return
        self.gaps += event.sequence != self.sequence + 1
        self.sequence = event.sequence
        if event.kind == buffer_pb2.GROUP_EVENT_KIND_ADDED:
            self.added.add(event.group_id)
        elif event.kind == buffer_pb2.GROUP_EVENT_KIND_EVICTED:
            self.evicted[event.group_id] = tuple(event.reasons)

    def faults(self) -> list[str]:
        """What does not fit together, one line each."""
        taken = set(self.sampled)
        ledger = self.counts
        named = (
            ("were acknowledged and not added", self.acknowledged - self.added),
            ("are lost", self.added - taken - set(self.evicted) - self.present),
            ("were sampled more than once", {each for each, times in self.sampled.items() if times > 1}),
            ("were sampled and never added", taken - self.added),
            ("were sampled and are still there", taken & self.present),
            ("were sampled and evicted", taken & set(self.evicted)),
            ("were sampled and not committed", taken - self.committed),
            ("were evicted without a reason", {each for each, reasons in self.evicted.items() if not reasons}),
            ("were evicted and are still there", set(self.evicted) & self.present),
        )
        found = [f"{len(ids)} groups {what}: {', '.join(sorted(ids)[:_NAMED])}" for what, ids in named if ids]
        if self.gaps:
            found.append(f"{self.gaps} gaps in the events")
        counted = (ledger.added, ledger.committed, ledger.evicted)
        ours = (len(self.added), len(self.committed), len(self.evicted))
        if counted != ours:
            found.append(f"the ledger says added, committed, evicted = {counted}, the ids {ours}")
        return [f"{self.run_id}: {each}" for each in found]


def read_notes(lines: Iterable[str], ledgers: dict[str, RunLedger]) -> None:
    """Take what trainers wrote down."""
    for line in lines:
        run_id, fate, ids = json.loads(line)
        ledgers[run_id].note(fate, ids)


async def follow(client: AsyncBufferClient, ledger: RunLedger, until: int | None = None) -> None:
    """Take the events of a run that are not taken yet, up to that of number `until`, else until cancelled."""
    request = buffer_pb2.WatchGroupsRequest(run_id=ledger.run_id, from_sequence=ledger.sequence + 1)
    if until is not None and ledger.sequence >= until:
        return
    async with aclosing(client.watch_groups(request)) as events:
        async for event in events:
            ledger.take(event)
            if until is not None and ledger.sequence >= until:
                return


async def close(client: AsyncBufferClient, ledger: RunLedger, partition: str) -> int:
    """Take what is there once nobody changes it any more; returns the sequence number of the last event."""
    token, last = "", 0
    while True:
        page = await client.calls.ListGroups(
            buffer_pb2.ListGroupsRequest(run_id=ledger.run_id, partition=partition, page_size=_PAGE, page_token=token)
        )
        ledger.present.update(group.group_id for group in page.groups)
        last, token = max(last, page.event_sequence), page.next_page_token
        if not token:
            break
    ledger.counts = await client.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=ledger.run_id, partition=partition))
    return last
