"""Group-relative policy optimisation of one batch.

Invariants: the policy that sampled is known by the log-probabilities that its engine gave, never recomputed; each
token of an answer counts the same, whichever answer it is in; a group whose answers are all equally good teaches
nothing and changes nothing.

    advantage  A_i = (r_i - mean(r)) / (std(r) + 1e-4), over the answers of a group (Shao et al. 2024, DeepSeekMath,
               equation 3 with outcome rewards; the deviation is that of the whole group, not an estimate)
    loss       -mean over tokens of min(q A, clip(q, 1 - low, 1 + high) A) + e H, q = exp(log p_new - log p_engine)
               (Schulman et al. 2017, equation 7; separate bounds as in DAPO, Yu et al. 2025, equation 10), no KL term.
               H is the entropy of the policy at that token (Williams and Peng 1991): a model this small, that starts
               without any knowledge, otherwise settles on the first answer that was ever right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from services.learner import alphabet

_SMALL: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: Sequence[float]
    """Of each token of the answer, by the engine that sampled it; at temperature 1."""

    reward: float


@dataclass(frozen=True, slots=True)
class Settings:
    """How a policy is changed."""

    learning_rate: float = 5e-3
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy: float = 0.05
    """e: what a nat of entropy is worth, in advantages."""

    max_norm: float = 1.0
    """Longest gradient."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a change of the policy went."""

    loss: float
    clipped_share: float
    """Of the tokens whose ratio was outside the bounds."""

    ratio_error: float
    """Largest |log p_new - log p_engine| before the change: rounding alone, if the engine had these very weights."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantage of each answer of one group."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (deviation + _SMALL) for reward in rewards]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a model thinks of some answers; each tensor is [answers, longest]."""

    logprobs: torch.Tensor
    """Of the answers' tokens; 0 after the end of a shorter answer."""

    entropy: torch.Tensor
    """Of the distribution that each token was drawn from, in nats; 0 after the end."""

    mask: torch.Tensor
    """1 where there is a token."""


def policy(model: Any, rollouts: Sequence[Rollout]) -> Policy:
    """Return what a model thinks of answers."""
    rows = [[*rollout.prompt, *rollout.answer] for rollout in rollouts]
    width = max(map(len, rows))
    # Padding goes to the right, where a causal model does not look.
    tokens = torch.tensor([row + [alphabet.PAD] * (width - len(row)) for row in rows])
    every = torch.log_softmax(model(tokens).logits[:, :-1], dim=-1)
    longest = max(len(rollout.answer) for rollout in rollouts)
    # Place of the token before each token of the answer, which is where the model says what comes next.
    first = torch.tensor([len(rollout.prompt) - 1 for rollout in rollouts])[:, None]
    places = (first + torch.arange(longest)).clamp(max=width - 2)
    lengths = torch.tensor([len(rollout.answer) for rollout in rollouts])[:, None]
    mask = (torch.arange(longest) < lengths).to(every.dtype)
    there = every.gather(1, places[:, :, None].expand(-1, -1, every.shape[-1]))
    taken = there.gather(2, tokens[:, 1:].gather(1, places)[:, :, None]).squeeze(2)
    return Policy(taken * mask, -(there.exp() * there).sum(dim=-1) * mask, mask)


class Learner:
    """A model and its optimiser."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model = model
        self._settings = settings
        self._optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)

    def learn(self, groups: Sequence[Sequence[Rollout]]) -> Outcome:
        """Change the policy once by a batch of groups, each of answers to one prompt."""
        settings = self._settings
        rollouts = [rollout for group in groups for rollout in group]
        worth = [value for group in groups for value in advantages([rollout.reward for rollout in group])]
        advantage = torch.tensor(worth)[:, None]
        now = policy(self.model, rollouts)
        width = now.mask.shape[1]
        sampled = torch.tensor([[*rollout.logprobs, *[0.0] * (width - len(rollout.logprobs))] for rollout in rollouts])
        difference = (now.logprobs - sampled) * now.mask
        ratio = difference.exp()
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        tokens = now.mask.sum()
        worth_of_tokens = torch.minimum(ratio * advantage, bounded * advantage) + settings.entropy * now.entropy
        loss = -(worth_of_tokens * now.mask).sum() / tokens
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_norm)
        self._optimizer.step()
        outside = ((ratio != bounded) * now.mask).sum() / tokens
        return Outcome(loss.item(), outside.item(), difference.detach().abs().max().item())
