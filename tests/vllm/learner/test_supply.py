"""Prompts of the job."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from services.demo.prompts import PromptsError
from services.learner.alphabet import SIZE, decode, encode
from services.learner.supply import LONGEST, load, questions, sample_file
from services.learner.task import reward


def test_the_shipped_prompts_can_be_used() -> None:
    """All of them, in tokens of the model."""
    prompts = load(sample_file())
    assert len(prompts) >= 10
    assert all(0 < token < SIZE for _, tokens in prompts for token in tokens)


def test_text_and_tokens_go_into_each_other() -> None:
    """Character by character."""
    assert decode(encode("say a.")) == "say a."


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [("Say a", "no token for 'S'"), ("say a.", "must end with the letter"), ("a" * (LONGEST + 1), "at most 64")],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, prompt: str, fault: str) -> None:
    """Before anything starts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"id": "x", "prompt": "{prompt}"}}\n', encoding="utf-8")
    with pytest.raises(PromptsError, match=f"prompt 'x'.*{fault}"):
        load(path)


def test_every_pass_has_each_prompt_once_under_another_id() -> None:
    """And depends on the seed alone."""
    prompts = load(sample_file())
    twice = list(islice(questions(prompts, 3), 2 * len(prompts)))
    assert len({one.group_id for one in twice}) == 2 * len(prompts)
    assert {one.prompt_id for one in twice[: len(prompts)]} == {prompt_id for prompt_id, _ in prompts}
    assert twice == list(islice(questions(prompts, 3), 2 * len(prompts)))
    assert twice != list(islice(questions(prompts, 4), 2 * len(prompts)))


def test_a_reward_is_the_share_of_right_places() -> None:
    """An answer that is too short has wrong places."""
    prompt = encode("say a")
    assert reward(prompt, encode("aaaa"), 4) == 1.0
    assert reward(prompt, encode("abab"), 4) == 0.5
    assert reward(prompt, encode("aa"), 4) == 0.5
    assert reward(prompt, encode("zzzz"), 4) == 0.0
