"""The pseudo language model: deterministic, lognormal, and garbage without weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.engine.domain.requests import Sampling
from services.engine.reference.model import FIRST_TOKEN, LengthLaw, PseudoModel

MODEL = PseudoModel()
CAP = 10**9


def lengths(prompts: int, seeds: int) -> np.ndarray:
    """Lengths, prompts by seeds."""
    return np.array(
        [[MODEL.script([p, 1], Sampling(seed=s), CAP).length for s in range(seeds)] for p in range(prompts)]
    )


def test_an_output_depends_on_prompt_and_seed_alone() -> None:
    """Two runs of one seed have to deliver the same tokens, wherever they were generated."""
    first = MODEL.script([1, 2], Sampling(seed=3), CAP)
    again = PseudoModel().script([1, 2], Sampling(seed=3, temperature=0.5), CAP)
    assert first == again
    assert first.tokens(0, 100).tolist() == again.tokens(0, 100).tolist()
    assert first != MODEL.script([1, 2], Sampling(seed=4), CAP)
    assert first != MODEL.script([2, 1], Sampling(seed=3), CAP)


def test_a_part_equals_the_part_of_the_whole() -> None:
    """Continuing an output must not change it."""
    script = MODEL.script([5], Sampling(seed=1), CAP)
    whole = script.tokens(0, 300).tolist()
    assert script.tokens(0, 120).tolist() + script.tokens(120, 300).tolist() == whole
    assert script.logprobs(100, 102).tolist() == script.logprobs(0, 300)[100:102].tolist()


def test_lengths_follow_the_law() -> None:
    """Mean 13 000, log-deviation 0.75, 85 % of the log-variance between prompts."""
    logs = np.log(lengths(1500, 4))
    assert float(np.exp(logs).mean()) == pytest.approx(13_000, rel=0.1)
    assert float(logs.std()) == pytest.approx(0.75, rel=0.08)
    within = float(logs.var(axis=1, ddof=1).mean())
    assert 1 - within / float(logs.var()) == pytest.approx(0.85, abs=0.03)


def test_the_budget_cuts_and_says_so() -> None:
    """LENGTH and STOP are told apart by the trainer."""
    natural = MODEL.script([1], Sampling(seed=1), CAP)
    assert natural.stopped
    cut = MODEL.script([1], Sampling(seed=1), natural.length - 1)
    assert (cut.length, cut.stopped) == (natural.length - 1, False)
    exact = MODEL.script([1], Sampling(seed=1), natural.length)
    assert (exact.length, exact.stopped) == (natural.length, True)


def test_a_stop_token_ends_the_output() -> None:
    """And belongs to it."""
    whole = MODEL.script([1], Sampling(seed=1), CAP).tokens(0, 200).tolist()
    stop = whole[50]
    stopped = MODEL.script([1], Sampling(seed=1, stop_token_ids=(stop,)), CAP)
    assert (stopped.length, stopped.stopped) == (whole.index(stop) + 1, True)
    assert MODEL.script([1], Sampling(seed=1, stop_token_ids=(3,)), 100).length == 100


def test_tokens_are_in_the_vocabulary() -> None:
    """An id outside of it kills a real engine."""
    tokens = PseudoModel(vocabulary=40).script([1], Sampling(seed=1), CAP).tokens(0, 5000)
    assert (int(tokens.min()), int(tokens.max())) == (FIRST_TOKEN, 39)
    logprobs = MODEL.script([1], Sampling(seed=1), CAP).logprobs(0, 1000)
    assert -4 <= float(logprobs.min()) < float(logprobs.max()) <= 0


def test_without_weights_the_tokens_are_others() -> None:
    """Garbage without an error is what makes a missing load dangerous."""
    script = MODEL.script([1], Sampling(seed=1), CAP)
    assert script.tokens(0, 50).tolist() != script.tokens(0, 50, garbage=True).tolist()
    assert script.logprobs(0, 50).tolist() != script.logprobs(0, 50, garbage=True).tolist()


def test_a_law_without_spread_gives_the_mean() -> None:
    """The formula of the lognormal mean, exp(mu + sigma^2 / 2)."""
    assert LengthLaw(mean=100.0, log_std=0.0).length(0.3, 0.9) == 100
    one = LengthLaw(mean=100.0, log_std=1.0, between_prompts=1.0)
    assert one.length(0.5, 0.99) == round(100 * math.exp(-0.5))
