"""Hooks for a trainer: asyncio (`AsyncTrainerHooks`) and blocking (`TrainerHooks`)."""

from turnout.trainer._batch import AsyncBatch, Batch
from turnout.trainer._blocking import TrainerHooks
from turnout.trainer._hooks import AsyncTrainerHooks, NotReached, resume_from
from turnout.trainer._setup import TrainerSetup
from turnout.trainer._weights import Moved, UpdateWeights, WeightTarget

__all__ = [
    "AsyncBatch",
    "AsyncTrainerHooks",
    "Batch",
    "Moved",
    "NotReached",
    "TrainerHooks",
    "TrainerSetup",
    "UpdateWeights",
    "WeightTarget",
    "resume_from",
]
