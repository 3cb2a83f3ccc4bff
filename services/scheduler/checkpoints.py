"""What the scheduler keeps of its runs under the checkpoints of their buffers.

Invariants: buffer and scheduler keep theirs under one id, the scheduler only once the buffer has; the id is durable
before the buffer hears of it, so that a Save which a restart cut goes on with the checkpoint that it asked for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from services.runtime.errors import Code, TurnoutError, failed_precondition, not_found
from services.scheduler.domain import events
from services.scheduler.domain.resume import Resume
from services.scheduler.domain.run import SavedState
from services.scheduler.hosted import Answered, HostedRun
from services.scheduler.undertaking import Undertaking
from turnout.scheduler.v1 import scheduler_pb2

_KEPT = 16
"""Saved states per run; trainers keep a handful of checkpoints and resume from one of the last."""


class Checkpoints:
    """The saved states of all runs."""

    def __init__(self) -> None:
        self._saved: dict[str, OrderedDict[str, SavedState]] = {}

    async def save(self, hosted: HostedRun, call: Undertaking, step: int) -> Answered:
        """Checkpoint the buffer, and keep the scheduler's state under the same id."""
        run, tools = hosted.run, hosted.tools
        if not call.checkpoint_id:
            call.checkpoint_id = f"{run.epoch}-{step}-{tools.new_id()}"
        checkpoint_id = call.checkpoint_id
        if not run.config.external_data:
            await hosted.durable()
            with checkpoints_needed():
                checkpoint_id = await hosted.buffer.checkpoint(
                    run.epoch, step, checkpoint_id, tools.settings.transition_timeout_s
                )
        self.keep(run.run_id, checkpoint_id, run.save())
        run.record(events.Saved(step, checkpoint_id), hosted.moment)
        manifest = {
            "version": 1,
            "run_id": run.run_id,
            "checkpoint_id": checkpoint_id,
            "step": step,
            "epoch": run.epoch,
            "buffer": not run.config.external_data,
        }
        manifest_json = json.dumps(manifest, sort_keys=True)
        return Answered(scheduler_pb2.SaveResponse(checkpoint_id=checkpoint_id, manifest_json=manifest_json))

    def keep(self, run_id: str, checkpoint_id: str, state: SavedState) -> None:
        """Keep a state, and give up the oldest if there are too many."""
        kept = self._saved.setdefault(run_id, OrderedDict())
        kept[checkpoint_id] = state
        while len(kept) > _KEPT:
            kept.popitem(last=False)

    def of(self, run_id: str) -> dict[str, SavedState]:
        """The states of a run by checkpoint, the oldest first."""
        return dict(self._saved.get(run_id, {}))

    def find(self, run_id: str, resume: Resume | None) -> SavedState | None:
        """What was kept under the checkpoint that a trainer resumes from, None if it names none.

        Raises NOT_FOUND / CHECKPOINT_NOT_FOUND, FAILED_PRECONDITION / RESUME_MISMATCH.
        """
        if resume is None or not resume.checkpoint_id:
            return None
        kept = self._saved.get(run_id)
        saved = None if kept is None else kept.get(resume.checkpoint_id)
        if saved is None:
            raise not_found(
                "CHECKPOINT_NOT_FOUND",
                f"the scheduler keeps no state under checkpoint {resume.checkpoint_id!r}",
                field="resume.checkpoint_id",
                value=resume.checkpoint_id,
            )
        if saved.step != resume.step:
            raise failed_precondition(
                "RESUME_MISMATCH",
                f"the trainer stands after step {resume.step}, the checkpoint was saved at step {saved.step}",
                field="resume.resume_step",
                resume_step=resume.step,
                checkpoint_step=saved.step,
            )
        return saved

    def forget(self, run_id: str) -> None:
        """Nobody will ask for this run again."""
        self._saved.pop(run_id, None)


@contextmanager
def checkpoints_needed() -> Iterator[None]:
    """Say plainly that the buffer has no checkpoints, if that is what fails."""
    try:
        yield
    except TurnoutError as error:
        if error.code is not Code.UNIMPLEMENTED:
            raise
        raise TurnoutError(
            Code.UNIMPLEMENTED,
            "CHECKPOINTS_UNAVAILABLE",
            "the run's buffer keeps no checkpoints; with external_data the scheduler's state is saved alone",
            error.metadata,
        ) from error
