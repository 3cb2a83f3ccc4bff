"""Whether a trainer may go on where it says it stands.

Invariant: a trainer whose step differs from what the services hold goes on only if it says what is to hold: a
checkpoint or the live state. Nothing is rolled back or kept by guessing.
"""

from dataclasses import dataclass

from services.runtime.errors import failed_precondition, invalid_argument

_LARGEST_STEP = 2**62
"""Beyond any job, and far from the end of the int64 that carries the steps after it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a resumed trainer stands: after `step`. `checkpoint_id` empty and not `keep_live`: the steps must agree."""

    step: int
    checkpoint_id: str = ""
    keep_live: bool = False


def check_resume(resume: Resume | None, scheduler_step: int | None, buffer_step: int) -> int:
    """The step after which the trainer goes on.

    `scheduler_step` is None if this scheduler does not know the run. Raises FAILED_PRECONDITION / RESUME_MISMATCH, and
    INVALID_ARGUMENT for a step that leaves no room for the next ones.
    """
    step = 0 if resume is None else resume.step
    if step > _LARGEST_STEP:
        raise invalid_argument("resume.resume_step", f"resume_step must be at most {_LARGEST_STEP}", value=step)
    if resume is not None and (resume.keep_live or resume.checkpoint_id):
        return step
    if scheduler_step in (None, step) and buffer_step == step:
        return step
    known = "is not known here" if scheduler_step is None else f"is at step {scheduler_step}"
    raise failed_precondition(
        "RESUME_MISMATCH",
        f"the trainer stands after step {step}, but the run {known} and its buffer is at step {buffer_step}: name a "
        "checkpoint, or say keep_live",
        field="resume.resume_step",
        resume_step=step,
        scheduler_step="unknown" if scheduler_step is None else scheduler_step,
        buffer_step=buffer_step,
    )
