"""A deterministic pseudo language model.

Invariants: length and tokens of an output depend on the prompt and the seed alone, not on the replica, the weight
version or interruptions, so an output that is continued elsewhere equals one that was never interrupted; without
weights the tokens are others (garbage), and nothing reports it, as with a real engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from services.engine.domain.requests import Sampling

FIRST_TOKEN: Final = 16
"""Ids below are left to what tokenizers keep for special tokens, so that a stop token never comes by accident."""

GARBAGE: Final = 0x6A09E667F3BCC909
"""Any constant that changes every token."""

_NORMAL: Final = NormalDist()
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Lognormal output lengths: `mean` tokens, `log_std` in all.

    `between_prompts` is the share of the log-variance that lies between prompts, the rest lies between samples of one.
    """

    mean: float = 13_000.0
    log_std: float = 0.75
    between_prompts: float = 0.85

    def length(self, prompt_uniform: float, sample_uniform: float) -> int:
        """The length for two uniform draws in (0, 1), at least 1."""
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean) - self.log_std**2 / 2
        between = self.log_std * math.sqrt(self.between_prompts)
        within = self.log_std * math.sqrt(1 - self.between_prompts)
        z = between * _NORMAL.inv_cdf(prompt_uniform) + within * _NORMAL.inv_cdf(sample_uniform)
        return max(1, round(math.exp(mu + z)))


@dataclass(frozen=True, slots=True)
class Script:
    """What the model will say to one prompt under one seed. `stopped` is False if the budget ends it first."""

    key: int
    vocabulary: int
    length: int
    stopped: bool

    def tokens(self, start: int, stop: int, garbage: bool = False) -> npt.NDArray[np.int32]:
        """The tokens at positions start to stop - 1."""
        mixed = self._mix(start, stop, garbage)
        return (mixed % np.uint64(self.vocabulary - FIRST_TOKEN)).astype(np.int32) + np.int32(FIRST_TOKEN)

    def logprobs(self, start: int, stop: int, garbage: bool = False) -> npt.NDArray[np.float32]:
        """Their log-probabilities, between -4 and 0."""
        high = self._mix(start, stop, garbage) >> np.uint64(40)
        return (high.astype(np.float32) / np.float32(1 << 24)) * np.float32(-4.0)

    def _mix(self, start: int, stop: int, garbage: bool) -> npt.NDArray[np.uint64]:
        # splitmix64 (Steele, Lea, Flood 2014), the position as its counter.
        key = np.uint64(self.key ^ GARBAGE if garbage else self.key)
        x = key + np.arange(start + 1, stop + 1, dtype=np.uint64) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class PseudoModel:
    """The model: a law of lengths and a vocabulary."""

    law: LengthLaw = field(default_factory=LengthLaw)
    vocabulary: int = 32_000

    def script(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> Script:
        """What it says to `prompt`, at most `max_tokens`; a stop token ends it, and is part of the output."""
        prompt_digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=16).digest()
        sample = hashlib.blake2b(prompt_digest + (sampling.seed % 2**64).to_bytes(8, "big"), digest_size=16).digest()
        natural = self.law.length(_uniform(prompt_digest[:8]), _uniform(sample[:8]))
        length = min(natural, max_tokens)
        script = Script(int.from_bytes(sample[8:], "big"), self.vocabulary, length, natural <= max_tokens)
        if sampling.stop_token_ids:
            hits = np.flatnonzero(np.isin(script.tokens(0, length), np.asarray(sampling.stop_token_ids)))
            if hits.size:
                return Script(script.key, self.vocabulary, int(hits[0]) + 1, True)
        return script


def _uniform(digest: bytes) -> float:
    # 53 bits, moved off both ends: the normal quantile needs an open interval.
    return (int.from_bytes(digest, "big") % 2**53 + 0.5) / 2**53
