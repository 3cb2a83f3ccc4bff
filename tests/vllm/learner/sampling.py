"""Answers sampled with torch: what an engine does, without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.learner.grpo import Rollout
from services.learner.task import reward


def sample(
    model: Any, prompt: Sequence[int], *, answers: int, length: int, generator: torch.Generator
) -> list[Rollout]:
    """Return a group of answers at temperature 1."""
    tokens = torch.tensor([list(prompt)] * answers)
    steps = []
    with torch.no_grad():
        for _ in range(length):
            logprobs = torch.log_softmax(model(tokens).logits[:, -1], dim=-1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
            steps.append(logprobs.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], dim=1)
    found = tokens[:, len(prompt) :].tolist()
    given = torch.cat(steps, dim=1).tolist()
    return [
        Rollout(prompt, answer, logprobs, reward(prompt, answer, length))
        for answer, logprobs in zip(found, given, strict=True)
    ]
