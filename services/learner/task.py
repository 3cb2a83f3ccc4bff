"""The task: the prompt ends with a letter, and the answer is that letter over and over.

Invariant: a reward is the share of the answer's places that hold the right letter, so it lies between 0 and 1 and an
answer that is partly right is worth something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

REWARD_RANGE: Final = (0.0, 1.0)


def reward(prompt: Sequence[int], answer: Sequence[int], length: int) -> float:
    """Return the reward of an answer, of which `length` tokens were asked."""
    return sum(token == prompt[-1] for token in answer[:length]) / length
