"""The oracle: compares what trainers and workers were told with what the events and the ledger say. Pure.

Invariants it holds the service to, per run: an id that was acknowledged is there; each has one fate, committed or
evicted; the ledger's counts are those of the fates; nothing is committed twice; a result that was acknowledged is the
one that the trainer gets; what was refused has left no trace. A restore makes the content that of its checkpoint, and
what came after that checkpoint void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.soak.book import Entry
from tests.soak.witness import Seen

Ledger = tuple[int, int, int]
"""Groups added, committed, evicted."""


@dataclass(slots=True)
class Told:
    """What one trainer was told, after its last restore."""

    base: dict[str, Entry] = field(default_factory=dict)
    """Checkpoints by id, as they were booked."""
    present: frozenset[str] = frozenset()
    """Ids that the last restore brought back."""
    ledger: Ledger = (0, 0, 0)
    """As the last restore made it."""
    restored_at: float = 0.0
    restores: int = 0
    added: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    """Asked for, and the answer never came."""
    refused: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    marks: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of committed trajectories: which result the trainer got."""
    all_marks: set[tuple[str, int, str]] = field(default_factory=set)
    """Of every trajectory that was ever handed out."""
    batches: int = 0
    faults: list[str] = field(default_factory=list)


def told_to_trainer(run_id: str, entries: Iterable[Entry]) -> Told:
    """Read a trainer's book."""
    told = Told()
    handed: dict[str, Entry] = {}
    for entry in entries:
        match entry["kind"]:
            case "adding":
                told.maybe.update(f"{run_id}-{number}" for number in entry["numbers"])
            case "added":
                told.added.update(entry["ids"])
            case "refused":
                told.refused.update(entry["ids"])
            case "leased":
                handed[entry["lease"]] = entry
                told.batches += 1
                told.all_marks.update((group, index, mark) for group, index, mark in entry["marks"])
            case "committed":
                twice = told.committed & set(entry["ids"])
                if twice:
                    told.faults.append(f"{run_id}: the trainer got {sorted(twice)} twice")
                told.committed.update(entry["ids"])
                # A commit is booked by a later life too, but the batch was by the one that got it.
                told.marks.update({(group, index): mark for group, index, mark in handed[entry["lease"]]["marks"]})
            case "checkpoint":
                told.base[entry["id"]] = entry
            case "restored":
                saved = told.base[entry["id"]]
                told.present, told.ledger = frozenset(saved["ids"]), tuple(saved["ledger"])
                told.restored_at = entry["at"]
                told.restores += 1
                for void in (told.added, told.maybe, told.refused, told.committed, told.marks):
                    void.clear()
            case _:
                pass
    told.maybe -= told.added | told.refused
    return told


@dataclass(slots=True)
class Fates:
    """What became of the groups, by the events after the last restore."""

    restores: int = 0
    added: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    """COMMITTED or EVICTED by id."""
    faults: list[str] = field(default_factory=list)

    def count(self, fate: str) -> int:
        """How many ended so."""
        return sum(ended == fate for ended in self.ended.values())


def fates_of(run_id: str, events: Sequence[Seen]) -> Fates:
    """Read a run's events."""
    fates = Fates()
    finished: Counter[tuple[str, int]] = Counter()
    for event in events:
        group = event.group_id
        if event.kind == "RESTORED":
            fates.restores += 1
            fates.added.clear()
            fates.ended.clear()
            finished.clear()
            continue
        if group in fates.ended:
            fates.faults.append(f"{run_id}: {group} is {event.kind} after it was {fates.ended[group]}")
        if event.kind == "ADDED":
            if group in fates.added:
                fates.faults.append(f"{run_id}: {group} was added twice")
            fates.added.add(group)
        elif event.kind in ("COMMITTED", "EVICTED"):
            fates.ended[group] = event.kind
        elif event.kind == "TRAJECTORY_FINISHED":
            finished[group, event.index] += 1
    for (group, index), times in finished.items():
        if times > 1:
            fates.faults.append(f"{run_id}: {group}/{index} finished {times} times")
    return fates


def compare(run_id: str, told: Told, fates: Fates, ledger: Ledger, present: int) -> list[str]:
    """Return what does not fit together, for a run that was drained."""
    faults = [*told.faults, *fates.faults]

    def same(what: str, one: object, other: object) -> None:
        if one != other:
            faults.append(f"{run_id}: {what}: {one} against {other}")

    added, committed, evicted = (now - before for now, before in zip(ledger, told.ledger, strict=True))
    same("restores told and seen", told.restores, fates.restores)
    same("groups left after draining", present, 0)
    same("added by the ledger and by events", added, len(fates.added))
    same("committed by the ledger and by what the trainer was told", committed, len(told.committed))
    same("committed by the ledger and by events", committed, fates.count("COMMITTED"))
    same("evicted by the ledger and by events", evicted, fates.count("EVICTED"))
    same("balance of the ledger", ledger[0], ledger[1] + ledger[2] + present)
    same("added and acknowledged, but not seen", sorted(told.added - fates.added), [])
    same("seen, but never asked for", sorted(fates.added - told.added - told.maybe), [])
    same("refused, but seen", sorted(told.refused & fates.added), [])
    same("without a fate", sorted((fates.added | told.present) - set(fates.ended)), [])
    same("with a fate, but never there", sorted(set(fates.ended) - fates.added - told.present), [])
    got = {group for group, fate in fates.ended.items() if fate == "COMMITTED"}
    same("committed for the trainer and by events", sorted(told.committed ^ got), [])
    return faults


@dataclass(slots=True)
class Work:
    """What the workers of one run sent and were told."""

    sent: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    """(group, index, time) by mark."""
    taken: set[str] = field(default_factory=set)
    """Marks of results whose outcome was OK."""


def told_to_workers(books: Iterable[Iterable[Entry]]) -> Work:
    """Read the books of the workers of one run."""
    work = Work()
    for book in books:
        for entry in book:
            if entry["kind"] == "sent":
                for group, index, mark in entry["items"]:
                    work.sent[mark] = (group, index, entry["at"])
            elif entry["kind"] == "told":
                work.taken.update(mark for _, _, mark, code in entry["items"] if code == 0)
    return work


def compare_work(run_id: str, told: Told, fates: Fates, work: Work) -> list[str]:
    """Return which results were lost, swapped or invented."""
    faults = []
    for group, index, mark in sorted(told.all_marks):
        if work.sent.get(mark, ("", -1, 0.0))[:2] != (group, index):
            faults.append(f"{run_id}: the result {mark} of {group}/{index} was never sent")
    for mark in sorted(work.taken):
        group, index, at = work.sent[mark]
        # What was sent before a restore may be void.
        if at <= told.restored_at:
            continue
        fate = fates.ended.get(group)
        if fate == "COMMITTED" and told.marks.get((group, index)) != mark:
            got = told.marks.get((group, index))
            faults.append(f"{run_id}: {mark} of {group}/{index} was acknowledged, and the trainer got {got}")
        elif fate is None:
            faults.append(f"{run_id}: {mark} of {group}/{index} was acknowledged, and the group is gone")
    return faults
