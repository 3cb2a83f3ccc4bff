"""The tokens of the tiny model: one per character.

Invariants: 32 tokens, so that a model without any knowledge finds the right one often enough to learn from it;
a text and its tokens have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PAD: Final = 0
_FIRST: Final = 1
CHARACTERS: Final = " abcdefghijklmnopqrstuvwxyz.,:?"
SIZE: Final = _FIRST + len(CHARACTERS)
"""Tokens of the vocabulary."""


class NotInAlphabet(ValueError):
    """A text has a character without a token."""


def encode(text: str) -> list[int]:
    """Return the tokens of a text; raises NotInAlphabet naming the character."""
    tokens = []
    for character in text:
        place = CHARACTERS.find(character)
        if place < 0:
            raise NotInAlphabet(f"no token for {character!r}; there are {CHARACTERS!r}")
        tokens.append(_FIRST + place)
    return tokens


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens; those that are no character are left out."""
    return "".join(CHARACTERS[token - _FIRST] for token in tokens if _FIRST <= token < SIZE)
