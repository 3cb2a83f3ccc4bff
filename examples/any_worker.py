"""A rollout worker: claims prompts, lets the engines generate, and grades.

Beside it: turnout up --run my-run --reference 1:1, and examples/any_trainer.py.
"""

import asyncio

from turnout.worker import RolloutWorker, WorkerSetup


def reward(job, generation):
    """Grade one output, here by its share of even tokens. job.prompt and job.tags are the prompt's."""
    tokens = generation.token_ids
    return {"reward": sum(token % 2 == 0 for token in tokens) / len(tokens)}


if __name__ == "__main__":
    setup = WorkerSetup("my-run", buffer="127.0.0.1:50051", engine="127.0.0.1:50052", max_tokens=1024)
    worker = RolloutWorker(setup, tokenize=lambda job: list(job.prompt), reward_fn=reward)
    asyncio.run(worker.run())
