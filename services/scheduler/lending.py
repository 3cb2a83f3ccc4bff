"""Moving the hybrid GPUs, through the engine controller.

Invariants: the mode says TRAINER only after the controller confirmed every hybrid free, whatever a transition answered;
a transition that failed leaves the run in between, and the next call that needs it goes on with what is left; a lend
that does not come about is undone before anything else is done. What is ordered is durable before the controller hears
of it, under the id that it keeps, so that the next process goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from services.runtime.draining import draining_error
from services.runtime.errors import Code, TurnoutError, aborted, failed_precondition
from services.runtime.logs import get_logger
from services.scheduler.convert import placement_to_proto
from services.scheduler.domain.events import LendKind, Mode, Transition, TransitionFailed
from services.scheduler.domain.lends import Lend
from services.scheduler.engine_peer import Replicas
from services.scheduler.hosted import HostedRun
from services.scheduler.policies.types import Placement

T = TypeVar("T")

_log = get_logger("scheduler")

_AGAIN: Final = (Code.UNAVAILABLE, Code.ABORTED)
"""Failures that pass by themselves. A missed deadline is left to the caller's next try: one call waits for a hung
replica once, unless it is patient."""

_PATIENT_PAUSE_S: Final = 1.0
"""Wall seconds between the tries of a patient call, after the first few: an agent is back within seconds or minutes."""


@dataclass(frozen=True, slots=True)
class Served:
    """A lend that is complete. cost_s: BeginLend + hybrid update + FinishLend."""

    cost_s: float
    failed: tuple[str, ...]


async def persist(hosted: HostedRun, attempt: Callable[[], Awaitable[T]], patience_s: float = 0.0) -> T:
    """The result of `attempt`, tried again while that may help.

    After the first few tries it goes on for `patience_s` wall seconds in all, until the service stops or another
    trainer takes the run over; the run says meanwhile why it is stuck.
    """
    tools = hosted.tools
    settings, clock = tools.settings, tools.clock
    ends, tried = clock.now() + patience_s / clock.scale, 0
    again = (*_AGAIN, Code.DEADLINE_EXCEEDED) if patience_s else _AGAIN
    while True:
        try:
            return await attempt()
        except TurnoutError as error:
            tried += 1
            patient = clock.now() < ends and hosted.fenced is None and not tools.draining.is_set
            hung = error.code is Code.DEADLINE_EXCEEDED
            if error.code not in again or not (patient or (tried < settings.transition_attempts and not hung)):
                raise
            if tried == settings.transition_attempts:
                _log.warning("waiting for engines", run_id=hosted.run.run_id, reason=error.message)
            if tried >= settings.transition_attempts:
                hosted.run.modes.failed(error.message)
        if tried < settings.transition_attempts:
            await clock.sleep(settings.transition_backoff_s * 2 ** (tried - 1))
        else:
            await tools.draining.race(asyncio.sleep(_PATIENT_PAUSE_S))


async def look(hosted: HostedRun, *, probed: bool = False) -> Replicas:
    """Read the hybrids, and take note of what the controller confirms; `probed`: their engines are asked now."""
    replicas = await hosted.engine.replicas(probed=probed)
    if replicas.bound:
        hosted.run.modes.saw(replicas.incarnation, replicas.free)
    else:
        # It was restarted and knows nothing of the run: that confirms nothing of the hybrids that it had.
        hosted.run.modes.restarted(replicas.incarnation)
    hosted.run.note_mode(hosted.moment)
    return replicas


def _failed(hosted: HostedRun, transition: Transition, error: TurnoutError) -> TurnoutError:
    """Record that a transition failed; the error for the caller."""
    operation_id = error.metadata.get("operation_id", "")
    message = f"{transition.name.lower()} failed: {error.message}"
    hosted.run.transition_failed(TransitionFailed(transition, error.reason, message, operation_id), hosted.moment)
    known = {key: value for key, value in error.metadata.items() if key not in ("mode", "cause")}
    return aborted(
        f"{transition.name}_FAILED", message, **{**known, "mode": hosted.run.mode.name, "cause": error.reason}
    )


async def take_back(hosted: HostedRun, *, patient: bool = False) -> float:
    """Take the GPUs back, however far a lend came; the seconds it took. `patient`: the trainer can do nothing without.

    Raises ABORTED / RECLAIM_FAILED or ABORT_LEND_FAILED; then the run stays in between. Raises UNAVAILABLE / DRAINING
    if the service stops before.
    """
    run = hosted.run
    transition = Transition.ABORT_LEND if run.unfinished_lend else Transition.RECLAIM
    run.reclaiming(hosted.moment)
    ordered_at = run.reclaim_ordered_at
    assert ordered_at is not None
    await hosted.durable()
    try:
        await persist(hosted, lambda: _order_back(hosted), hosted.tools.settings.reclaim_patience_s if patient else 0.0)
    except TurnoutError as error:
        if hosted.tools.draining.is_set:
            # The next process goes on with it, and the trainer's repeat joins that.
            raise draining_error() from error
        raise _failed(hosted, transition, error) from error
    cost_s = hosted.tools.clock.now() - ordered_at
    run.returned(cost_s, hosted.moment)
    return cost_s


async def _order_back(hosted: HostedRun) -> None:
    run, engine = hosted.run, hosted.engine
    if run.unfinished_lend:
        try:
            await engine.abort_lend(run.epoch, run.unfinished_lend)
        except TurnoutError as error:
            if error.code not in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                raise
            # The controller knows of no such lend (any more): what is left of it, a reclaim takes back.
            await engine.reclaim(run.epoch)
        run.unfinished_lend = ""
    else:
        await engine.reclaim(run.epoch)
    if not all((await look(hosted, probed=True)).free.values()):
        await engine.reclaim(run.epoch)
        await look(hosted)
    unconfirmed = run.modes.unconfirmed
    if unconfirmed:
        raise aborted(
            "NOT_CONFIRMED_FREE",
            f"the controller does not confirm that these hybrids are free: {', '.join(unconfirmed)}",
            replicas=", ".join(unconfirmed),
        )


async def ensure_trainer(hosted: HostedRun, *, patient: bool = False) -> float | None:
    """Let the trainer have its GPUs, confirmed by their engines now: one may have been started anew by a supervisor.

    The seconds of a reclaim, None if none was needed. `patient` as for `take_back`. Raises as it does; UNAVAILABLE /
    ENGINE_UNREACHABLE where nobody can tell.
    """
    run = hosted.run
    if not run.can_lend:
        return None
    if not run.modes.lent:
        await persist(hosted, lambda: look(hosted, probed=True))
        if run.mode is Mode.TRAINER:
            return None
    served = run.served
    cost_s = await take_back(hosted, patient=patient)
    return cost_s if served else None


async def begin(
    hosted: HostedRun, lend: Lend, placement: Placement | None = None, *, keep_sessions: bool = False
) -> None:
    """Begin `lend` on the controller, or go on with that if it is open. `placement`: where running requests go on.

    Raises ABORTED / LEND_FAILED, with the lend abandoned and the run in between until `undo`; or the refusal of a lend
    that cannot begin, with nothing changed.
    """
    run = hosted.run
    if run.lends.open is not lend:
        await ensure_trainer(hosted)
        await claim_hybrids(hosted)
        run.begin_lend(lend, hosted.moment)
    try:
        await _begin_on_controller(hosted, lend, placement, keep_sessions=keep_sessions)
    except TurnoutError as error:
        failure = _failed(hosted, Transition.LEND, error)
        run.abandoned(lend, failure.message, hosted.moment)
        raise failure from error


async def _begin_on_controller(
    hosted: HostedRun, lend: Lend, placement: Placement | None = None, *, keep_sessions: bool
) -> None:
    run, clock = hosted.run, hosted.tools.clock
    placed = None if placement is None else placement_to_proto(placement, run.config.partition)
    run.unfinished_lend = lend.lend_id
    if lend.ordered_at is None:
        lend.ordered_at = clock.now()
    await hosted.durable()
    lend.replica_ids = await persist(
        hosted, lambda: hosted.engine.begin_lend(run.epoch, lend.lend_id, placed, keep_sessions=keep_sessions)
    )
    lend.begin_s = clock.now() - lend.ordered_at
    lend.ordered_at = None
    lend.begun = True


async def undo(hosted: HostedRun) -> None:
    """Take back what an abandoned lend left. If that fails, the run is in between, and the next call that lets the
    trainer train tries again."""
    if hosted.run.modes.in_between:
        with contextlib.suppress(TurnoutError):
            await take_back(hosted)


async def claim_hybrids(hosted: HostedRun) -> None:
    """Hold the GPUs of the registered hybrids. Raises FAILED_PRECONDITION / NO_HYBRIDS or GPU_HELD."""
    run = hosted.run
    replicas = await look(hosted)
    if not replicas.hybrids:
        raise failed_precondition(
            "NO_HYBRIDS", "no hybrid replica is registered at the engine controller", run_id=run.run_id
        )
    hosted.tools.holdings.claim(run.run_id, [*run.config.hybrid_devices, *replicas.gpus])


async def begin_init(hosted: HostedRun, lend: Lend) -> None:
    """Begin the lend of a run's start: on the controller if hybrids are registered, else at `finish`."""
    hosted.run.begin_lend(lend, hosted.moment)
    if hosted.run.modes.hybrids:
        # What fails here is tried again by CompleteLend: the trainer has not begun to move weights.
        try:
            await _begin_on_controller(hosted, lend, keep_sessions=False)
        except TurnoutError:
            lend.ordered_at = None


async def finish(hosted: HostedRun, lend: Lend, hybrid_update_s: float) -> Served:
    """Let the hybrids of `lend` serve, those that can; OK if one does.

    Raises ABORTED / LEND_FAILED (the run stays LENDING, and the lend open), FAILED_PRECONDITION / NO_HYBRIDS, GPU_HELD.
    """
    run = hosted.run
    await claim_hybrids(hosted)
    try:
        if not lend.begun:
            await _begin_on_controller(hosted, lend, keep_sessions=False)
        if lend.ordered_at is None:
            lend.ordered_at = hosted.tools.clock.now()
        await hosted.durable()
        await persist(hosted, lambda: hosted.engine.finish_lend(run.epoch, lend.lend_id, lend.weight_version))
        failed: tuple[str, ...] = ()
    except TurnoutError as error:
        serving, failed = await _serving(hosted, lend)
        if not serving:
            lend.ordered_at = None
            raise _failed(hosted, Transition.LEND, error) from error
    finish_s = 0.0 if lend.ordered_at is None else hosted.tools.clock.now() - lend.ordered_at
    cost_s = lend.begin_s + hybrid_update_s + finish_s
    run.completed(lend, cost_s, hosted.moment)
    return Served(cost_s, failed)


async def _serving(hosted: HostedRun, lend: Lend) -> tuple[bool, tuple[str, ...]]:
    """Whether any replica of the lend serves, and those that do not."""
    if not lend.begun:
        return False, ()
    try:
        hybrids = (await hosted.engine.replicas()).hybrids
    except TurnoutError:
        return False, ()
    # Hybrids that registered while the lend of the start was open have joined it.
    lent = tuple(sorted(hybrids)) if lend.kind is LendKind.INIT else lend.replica_ids
    failed = tuple(r for r in lent if r not in hybrids or not hybrids[r].serving)
    return len(failed) < len(lent), failed
