"""What every prompt and result has to be: pure functions of ids, so that any process can make and check them."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


def draw(*key: object) -> random.Random:
    """Return the randomness that belongs to these ids."""
    return random.Random(blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest())


def size_of(rng: random.Random, largest: int) -> int:
    """Draw a size in bytes: mostly small, some as large as may travel inline, a few up to `largest`."""
    kind = rng.random()
    if kind < 0.02:
        return 0
    if kind < 0.75:
        return rng.randint(1, 8 * KIB)
    if kind < 0.92:
        return rng.randint(16 * KIB, 256 * KIB)
    return rng.randint(256 * KIB + 1, max(largest, 256 * KIB + 1))


def prompt(run_id: str, group_id: str) -> bytes:
    """Return the bytes of a prompt: one in twelve is above 256 KiB, so it travels by reference."""
    rng = draw("prompt", run_id, group_id)
    return rng.randbytes(rng.randint(256 * KIB + 1, 400 * KIB) if rng.random() < 1 / 12 else rng.randint(0, 4 * KIB))


def result(run_id: str, group_id: str, index: int, largest: int) -> bytes:
    """Return the payload of a finished trajectory."""
    rng = draw("result", run_id, group_id, index)
    return rng.randbytes(size_of(rng, largest))


def partial(run_id: str, group_id: str, index: int) -> bytes:
    """Return the payload of a trajectory that was interrupted."""
    rng = draw("partial", run_id, group_id, index)
    return rng.randbytes(rng.randint(1, 64 * KIB))


def group_size(run_id: str, group_id: str) -> int:
    """Return the number of trajectories of a group, 1 to 4."""
    return draw("size", run_id, group_id).randint(1, 4)


def reward(run_id: str, group_id: str, index: int) -> float:
    """Return the reward of a trajectory; in one group of eight all are equal."""
    if draw("variance", run_id, group_id).random() < 1 / 8:
        return 0.5
    return index + draw("reward", run_id, group_id, index).random() / 2
