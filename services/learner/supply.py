"""The prompts of a job: a file in the form of the demo's, pass after pass, each in an order of its own.

Invariants: the stream depends on file and seed alone; a prompt that the model cannot read, or that asks for nothing, is
refused with its id before anything starts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Final

from services.demo.prompts import PromptsError, load_prompts
from services.learner import alphabet

LONGEST: Final = 64
"""Tokens of a prompt; with the answer it has to fit into the model."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as one group of the job."""

    group_id: str
    prompt_id: str
    tokens: tuple[int, ...]


def sample_file() -> Path:
    """Return the prompts that ship with the package."""
    return Path(str(resources.files("services.learner") / "prompts.jsonl"))


def load(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return id and tokens of every prompt of a file; raises PromptsError."""
    found = []
    for prompt in load_prompts(path):
        try:
            tokens = tuple(alphabet.encode(prompt.text))
        except alphabet.NotInAlphabet as error:
            raise PromptsError(f"{path}: prompt {prompt.prompt_id!r}: {error}") from error
        if len(tokens) > LONGEST:
            raise PromptsError(f"{path}: prompt {prompt.prompt_id!r} has {len(tokens)} characters, at most {LONGEST}")
        if not prompt.text[-1].isalpha():
            raise PromptsError(f"{path}: prompt {prompt.prompt_id!r} must end with the letter that is the answer")
        found.append((prompt.prompt_id, tokens))
    return found


def questions(prompts: list[tuple[str, tuple[int, ...]]], seed: int) -> Iterator[Question]:
    """Yield groups without end."""
    for turn in count():
        order = list(prompts)
        random.Random(f"{seed}/{turn}").shuffle(order)
        for prompt_id, tokens in order:
            yield Question(f"{prompt_id}/{turn}", prompt_id, tokens)
