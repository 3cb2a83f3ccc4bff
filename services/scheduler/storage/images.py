"""What is kept of a run, as messages, and back.

Invariant: what is read back is what was written; what follows from the process (connections, who waits, what was seen
of engines) is not written.
"""

from __future__ import annotations

from services.scheduler.convert import decision_from_proto, decision_to_proto
from services.scheduler.convert_events import happening_from_proto, happening_to_proto
from services.scheduler.domain.calls import Call, CallKey, Phase, Position
from services.scheduler.domain.config import RunConfig
from services.scheduler.domain.events import DecisionAction, LendKind, Mode, TopologyChanged
from services.scheduler.domain.holdings import Gpu
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.run import Notes, Run
from services.scheduler.domain.timings import StepTimings
from services.scheduler.hosted import Following, HostedRun
from services.scheduler.undertaking import Undertaking, WaitEnd
from turnout.scheduler.storage.v1 import storage_pb2 as st

# ------------------------------------------------------------------------------------------------------------- writing


def key_to(key: CallKey) -> st.CallKey:
    """A call's key."""
    return st.CallKey(
        call=key.call.value, step=key.step, mini_batch=key.mini_batch, attempt=key.attempt, lend_id=key.lend_id
    )


def state_of(hosted: HostedRun) -> st.RunState:
    """Where a run stands."""
    run = hosted.run
    position, notes, announced = run.order.position, run.notes, run.notes.announced_sample
    return st.RunState(
        epoch=run.epoch,
        open=run.is_open,
        closing=run.closing,
        resumed=run.resumed,
        opened_wall=run.opened_wall,
        origin_at=run.origin,
        config_json=run.config.as_json(),
        next_config_json="" if run.pending is None else run.pending.as_json(),
        intent=run.modes.intent,  # type: ignore[arg-type]
        stuck_reason=run.modes.stuck,
        reported=notes.reported,  # type: ignore[arg-type]
        lend=None if run.lends.open is None else _lend_to(run.lends.open),
        unfinished_lend=run.unfinished_lend,
        served=run.served,
        reclaim_ordered_at=run.reclaim_ordered_at,
        lends=run.lends.completed,
        reclaims=run.reclaims,
        position=st.Position(
            phase=position.phase.value,
            step=position.step,
            mini_batch=position.mini_batch,
            attempt=position.attempt,
            lend_id=position.lend_id,
            exhausted=position.exhausted,
        ),
        announced_step=notes.announced_step,
        announced_sample=None if announced is None else st.CallKey(step=announced[0], mini_batch=announced[1]),
        starving=notes.starving,
        waiting_action=notes.waiting_action or 0,  # type: ignore[arg-type]
        threshold=run.threshold,
        wait_seconds=run.timings.wait_s,
        reclaim_seconds=run.timings.reclaim_s,
        undertaking=None if hosted.undertaking is None else _undertaking_to(hosted.undertaking),
    )


def _lend_to(lend: Lend) -> st.OpenLend:
    return st.OpenLend(
        lend_id=lend.lend_id,
        kind=lend.kind,  # type: ignore[arg-type]
        weight_version=lend.weight_version,
        allow_older=lend.allow_older,
        begin_seconds=lend.begin_s,
        begun=lend.begun,
        replica_ids=lend.replica_ids,
        ordered_at=lend.ordered_at,
    )


def _undertaking_to(undertaking: Undertaking) -> st.Undertaking:
    end = undertaking.wait_end
    return st.Undertaking(
        key=key_to(undertaking.key),
        content=undertaking.content,
        request=undertaking.request,
        decided=undertaking.decided,
        decision=decision_to_proto(undertaking.decision),
        sampleable=undertaking.sampleable,
        metrics=undertaking.metrics,
        wait_end=None
        if end is None
        else st.WaitEnd(
            outcome=end.outcome,
            done=end.done,
            decision=decision_to_proto(end.decision),
            reason=end.reason,
            waited_seconds=end.waited_s,
        ),
        lend_id=undertaking.lend_id,
        lend_failure=undertaking.lend_failure,
        checkpoint_id=undertaking.checkpoint_id,
    )


def following_of(hosted: HostedRun) -> st.Following:
    """How far a run's peers were followed."""
    following = hosted.following
    return st.Following(
        next_group_event=following.next_group_event,
        last_replica=following.last_replica,
        topology=None if following.topology is None else happening_to_proto(following.topology),
    )


def places_of(hosted: HostedRun) -> st.Places:
    """Which hybrids a run has, and which GPUs it holds."""
    run = hosted.run
    message = st.Places(hybrids=run.modes.hybrids)
    for gpu in sorted(hosted.tools.holdings.of(run.run_id)):
        message.held.add(node=gpu.node, uuid=gpu.uuid)
    return message


# ------------------------------------------------------------------------------------------------------------- reading


def key_from(message: st.CallKey) -> CallKey:
    """A call's key. Raises ValueError for a call that this version does not know."""
    return CallKey(Call(message.call), message.step, message.mini_batch, message.attempt, message.lend_id)


def restore_run(run: Run, state: st.RunState, places: st.Places) -> None:
    """Let a new run be where `state` says. Events, answers and lends that are over are put back apart."""
    run.epoch = state.epoch
    run.is_open = state.open
    run.closing = state.closing
    run.resumed = state.resumed
    run.opened_wall = state.opened_wall
    run.origin = state.origin_at
    run.pending = RunConfig.of_json(state.next_config_json) if state.next_config_json else None
    run.modes.restore(Mode(state.intent), state.stuck_reason, places.hybrids)
    run.lends.restore(_lend_from(state.lend) if state.HasField("lend") else None, state.lends)
    run.unfinished_lend = state.unfinished_lend
    run.served = state.served
    run.reclaim_ordered_at = state.reclaim_ordered_at if state.HasField("reclaim_ordered_at") else None
    run.reclaims = state.reclaims
    position = state.position
    run.order.position = Position(
        Phase(position.phase),
        position.step,
        position.mini_batch,
        position.attempt,
        position.lend_id,
        position.exhausted,
    )
    sample = state.announced_sample
    run.notes = Notes(
        announced_step=state.announced_step,
        announced_sample=(sample.step, sample.mini_batch) if state.HasField("announced_sample") else None,
        starving=state.starving,
        reported=Mode(state.reported),
        waiting_action=DecisionAction(state.waiting_action) if state.waiting_action else None,
    )
    run.threshold = state.threshold if state.HasField("threshold") else None
    run.timings = StepTimings(state.wait_seconds, state.reclaim_seconds if state.HasField("reclaim_seconds") else None)


def _lend_from(message: st.OpenLend) -> Lend:
    return Lend(
        message.lend_id,
        LendKind(message.kind),
        message.weight_version,
        message.allow_older,
        message.begin_seconds,
        message.begun,
        tuple(message.replica_ids),
        message.ordered_at if message.HasField("ordered_at") else None,
    )


def undertaking_from(message: st.Undertaking) -> Undertaking:
    """A call that was being worked on."""
    end = message.wait_end
    return Undertaking(
        key=key_from(message.key),
        content=message.content,
        request=message.request,
        decided=message.decided,
        decision=decision_from_proto(message.decision) if message.HasField("decision") else None,
        sampleable=message.sampleable,
        metrics=dict(message.metrics),
        wait_end=WaitEnd(
            end.outcome,
            end.done,
            decision_from_proto(end.decision) if end.HasField("decision") else None,
            end.reason,
            end.waited_seconds,
        )
        if message.HasField("wait_end")
        else None,
        lend_id=message.lend_id,
        lend_failure=message.lend_failure,
        checkpoint_id=message.checkpoint_id,
    )


def following_from(message: st.Following) -> Following:
    """How far a run's peers were followed."""
    topology = happening_from_proto(TopologyChanged, message.topology) if message.HasField("topology") else None
    next_event = message.next_group_event if message.HasField("next_group_event") else None
    return Following(next_event, message.last_replica, topology)


def held_from(message: st.Places) -> list[Gpu]:
    """The GPUs that a run held."""
    return [Gpu(gpu.node, gpu.uuid) for gpu in message.held]
