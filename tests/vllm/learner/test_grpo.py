"""One change of the policy, against what the formulas say."""

from __future__ import annotations

import math

import pytest
import torch

from services.learner.alphabet import encode
from services.learner.grpo import Learner, Rollout, Settings, advantages, policy
from services.learner.model import make_model
from tests.vllm.learner.sampling import sample

LENGTH = 4


def test_advantages_are_normalised_within_their_group() -> None:
    """Mean 0, deviation 1."""
    found = advantages([0.0, 0.0, 1.0, 1.0])
    assert found == pytest.approx([-1.0, -1.0, 1.0, 1.0], rel=1e-3)


def test_log_probabilities_do_not_depend_on_what_else_is_in_the_batch() -> None:
    """Prompts and answers of different lengths are padded where the model does not look."""
    model = make_model(0)
    short = Rollout(encode("a"), encode("bc"), [0.0, 0.0], 0.0)
    long = Rollout(encode("say it: d"), encode("efghi"), [0.0] * 5, 0.0)
    together = policy(model, [short, long])
    assert together.mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    for number, rollout in enumerate((short, long)):
        alone, length = policy(model, [rollout]), len(rollout.answer)
        assert torch.allclose(together.logprobs[number, :length], alone.logprobs[0], atol=1e-5)
        assert torch.allclose(together.entropy[number, :length], alone.entropy[0], atol=1e-5)
    tokens = [*long.prompt, *long.answer]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    first = torch.distributions.Categorical(logits=logits[len(long.prompt) - 1])
    assert together.logprobs[1, 0].item() == pytest.approx(
        first.log_prob(torch.tensor(long.answer[0])).item(), abs=1e-5
    )
    assert together.entropy[1, 0].item() == pytest.approx(first.entropy().item(), abs=1e-5)


def test_the_better_answer_becomes_more_probable() -> None:
    """And the worse one less."""
    model = make_model(0)
    generator = torch.Generator().manual_seed(0)
    prompt = encode("say a")
    [one, two] = sample(model, prompt, answers=2, length=LENGTH, generator=generator)
    good = Rollout(prompt, one.answer, one.logprobs, 1.0)
    bad = Rollout(prompt, two.answer, two.logprobs, 0.0)
    before = policy(model, [good, bad]).logprobs
    outcome = Learner(model, Settings()).learn([[good, bad]])
    after = policy(model, [good, bad]).logprobs
    assert outcome.ratio_error < 1e-4
    assert outcome.clipped_share == 0.0
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


def test_a_group_of_equal_answers_changes_nothing() -> None:
    """Nothing is known of what would have been better."""
    model = make_model(0)
    group = sample(model, encode("say a"), answers=4, length=LENGTH, generator=torch.Generator().manual_seed(0))
    same = [Rollout(one.prompt, one.answer, one.logprobs, 0.5) for one in group]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    Learner(model, Settings(entropy=0.0)).learn([same])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_entropy_is_worth_something() -> None:
    """Where answers teach nothing, the policy becomes less sure."""
    model = make_model(0)
    group = sample(model, encode("say a"), answers=4, length=LENGTH, generator=torch.Generator().manual_seed(0))
    same = [Rollout(one.prompt, one.answer, one.logprobs, 0.5) for one in group]
    before = policy(model, same).entropy.mean()
    Learner(model, Settings(entropy=0.1, learning_rate=1e-3)).learn([same])
    assert policy(model, same).entropy.mean() > before


@pytest.mark.parametrize(("reward", "shift"), [(1.0, math.log(2)), (0.0, math.log(0.5))])
def test_a_ratio_beyond_its_bound_gives_no_gradient(reward: float, shift: float) -> None:
    """An answer that already became much more (or less) probable is left alone."""
    model = make_model(0)
    prompt = encode("say a")
    answers = [encode("aaaa"), encode("bbbb")]
    now = policy(model, [Rollout(prompt, answer, [0.0] * LENGTH, 0.0) for answer in answers]).logprobs
    moved = Rollout(prompt, answers[0], (now[0] - shift).tolist(), reward)
    # The other answer is beyond its bound on the other side, so that neither teaches.
    other = Rollout(prompt, answers[1], (now[1] + shift).tolist(), 1.0 - reward)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    outcome = Learner(model, Settings(entropy=0.0)).learn([[moved, other]])
    assert outcome.clipped_share == 1.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
