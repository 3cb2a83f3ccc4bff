"""What SGLang does not tell about itself, kept in its own weight version, the only text that it keeps for others.

SGLang tells neither whether it is paused nor what memory it has released, and its scheduler dies if memory that is
released is released again, or memory that is there is resumed. So whoever speaks to it next, such as a controller after
its restart, must find that out from the server itself. The text is the version alone while the engine is awake and
runs, else `7 paused`, `7 paused level=2 asleep=kv_cache,weights`, or `7 changing` while a change is under way.

Invariant: a text that nobody here wrote is a version of an engine that is awake and runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """The state of an engine. `changing`: a change began of which nobody knows how it ended."""

    version: str = ""
    paused: bool = False
    asleep: frozenset[str] = frozenset()
    level: int = 0
    changing: bool = False

    def write(self) -> str:
        """The text for the server."""
        words = [self.version]
        if self.changing:
            words.append("changing")
        if self.paused:
            words.append("paused")
        if self.level:
            words.append(f"level={self.level}")
        if self.asleep:
            words.append(f"asleep={','.join(sorted(self.asleep))}")
        return " ".join(words)


def read_note(text: str) -> Note:
    """Read the text of a server."""
    version, _, rest = text.partition(" ")
    words = rest.split()
    named = dict(word.split("=", 1) for word in words if "=" in word)
    plain = {word for word in words if "=" not in word}
    level = named.get("level", "0")
    if not plain <= {"paused", "changing"} or not named.keys() <= {"level", "asleep"} or not level.isdecimal():
        return Note(text)
    asleep = frozenset(tag for tag in named.get("asleep", "").split(",") if tag)
    return Note(version, "paused" in plain, asleep, int(level), "changing" in plain)
