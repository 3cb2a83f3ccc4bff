"""A rollout worker: claims trajectories, generates them and hands the results in.

worker = RolloutWorker(WorkerSetup(run_id="r1", buffer="127.0.0.1:50051", engine="127.0.0.1:50052"))
await worker.run()
"""

from turnout.worker._generation import Interrupted, RequestFn, RewardFn, TokenizeFn
from turnout.worker._job import Job
from turnout.worker._setup import WorkerSetup, WorkerStats
from turnout.worker._tokens import TOKENS, TOKENS_AND_LOGPROBS, pack, unpack
from turnout.worker._worker import GenerateFn, RolloutWorker

__all__ = [
    "TOKENS",
    "TOKENS_AND_LOGPROBS",
    "GenerateFn",
    "Interrupted",
    "Job",
    "RequestFn",
    "RewardFn",
    "RolloutWorker",
    "TokenizeFn",
    "WorkerSetup",
    "WorkerStats",
    "pack",
    "unpack",
]
