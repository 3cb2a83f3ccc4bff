"""DroppedPrompts: which prompts are dropped again and again and never trained on.

Discarding what is stale and trying again starves prompts that need long rollouts, and nothing in the sums of evictions
tells which. Invariants: a prompt that was dropped more often than (all drops) / capacity since it was last trained on
is in the report; its true count lies within `dropped - overcount` and `dropped`; memory is bounded by the capacity.

Space-Saving of Metwally, Agrawal and El Abbadi 2005 ("Efficient computation of frequent and top-k elements in data
streams"), but a prompt that is trained on leaves: what was pushed out last does not bound what was pushed out before,
and the highest count that was is kept as well.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.buffer.domain.evictions import EvictionReason

# Some 300 kB: more prompts than anybody looks through, and every one that takes more than a thousandth of the drops.
CAPACITY = 1000


@dataclass(slots=True)
class DroppedPrompt:
    """One prompt; `stale` and `failed` are reasons of its drops, and may overlap. The rest is of the last one."""

    prompt_id: str
    dropped: int = 0
    overcount: int = 0
    stale: int = 0
    failed: int = 0
    group_id: str = ""
    born: int = 0
    step: int = 0
    length: int = 0
    attempt: int = 0

    @property
    def least(self) -> int:
        """How often it was dropped at least."""
        return self.dropped - self.overcount


class DroppedPrompts:
    """The prompts that were dropped most, of one partition."""

    __slots__ = ("_by_count", "_capacity", "_entries", "pushed_out")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._entries: dict[str, DroppedPrompt] = {}
        # The highest count of one that was pushed out.
        self.pushed_out = 0
        # Those of one count, in the order in which they came to it.
        self._by_count: dict[int, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def drop(
        self,
        prompt_id: str,
        reasons: Collection[EvictionReason],
        group_id: str,
        *,
        born: int,
        step: int,
        length: int,
        attempt: int,
    ) -> None:
        """A group of the prompt left unused."""
        entry = self._entries.get(prompt_id)
        if entry is not None:
            self._leave(entry)
        else:
            if len(self._entries) >= self._capacity:
                least = min(self._by_count)
                self.forget(next(iter(self._by_count[least])))
                self.pushed_out = max(self.pushed_out, least)
            entry = DroppedPrompt(prompt_id, self.pushed_out, self.pushed_out)
        entry.dropped += 1
        entry.stale += EvictionReason.STALE in reasons
        entry.failed += EvictionReason.FAILED in reasons
        entry.group_id, entry.born, entry.step = group_id, born, step
        entry.length, entry.attempt = length, attempt
        self._enter(entry)

    def forget(self, prompt_id: str) -> None:
        """The prompt was trained on, if it is in the report."""
        entry = self._entries.get(prompt_id)
        if entry is not None:
            self._leave(entry)

    def _enter(self, entry: DroppedPrompt) -> None:
        self._entries[entry.prompt_id] = entry
        self._by_count.setdefault(entry.dropped, OrderedDict())[entry.prompt_id] = None

    def _leave(self, entry: DroppedPrompt) -> None:
        del self._entries[entry.prompt_id]
        same = self._by_count[entry.dropped]
        del same[entry.prompt_id]
        if not same:
            del self._by_count[entry.dropped]

    def worst(self, limit: int) -> list[DroppedPrompt]:
        """The prompts that were surely dropped most, most first."""
        ordered = sorted(self._entries.values(), key=lambda entry: (-entry.least, -entry.dropped, entry.prompt_id))
        return ordered[:limit]

    def kept(self) -> list[DroppedPrompt]:
        """Everything, in an order that `restore` understands."""
        return [self._entries[name] for count in sorted(self._by_count) for name in self._by_count[count]]

    def restore(self, entries: Iterable[DroppedPrompt], pushed_out: int) -> None:
        """Take what `kept` and `pushed_out` gave."""
        self.pushed_out = pushed_out
        for entry in entries:
            self._enter(entry)
