"""The learning itself, without services and engines: the same model, task, prompts and updates, sampled with torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from services.learner.figures import GOAL
from services.learner.grpo import Learner, Settings
from services.learner.job import Job
from services.learner.model import make_model
from services.learner.supply import load, questions, sample_file
from tests.vllm.learner.sampling import sample


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of a model this small two threads mostly wait for each other, on a busy machine many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shipped_job_learns_its_task(seed: int) -> None:
    """From random weights, by rewards alone."""
    job = Job(seed=seed)
    model = make_model(seed)
    learner = Learner(model, Settings(learning_rate=job.learning_rate))
    supply = questions(load(sample_file()), seed)
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for _ in range(job.steps):
        groups = [
            sample(model, one.tokens, answers=job.group_size, length=job.answer_tokens, generator=generator)
            for one in islice(supply, job.batch_size)
        ]
        rewards.append(statistics.fmean(rollout.reward for group in groups for rollout in group))
        for first in range(0, job.batch_size, job.mini_batch_size):
            learner.learn(groups[first : first + job.mini_batch_size])
    quarter = job.steps // 4
    assert statistics.fmean(rewards[-quarter:]) - statistics.fmean(rewards[:quarter]) >= GOAL, rewards
