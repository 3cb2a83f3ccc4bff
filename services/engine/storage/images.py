"""The images that the journal holds, and the domain's counterparts.

Invariant: what is written and read again is equal to what it was.
"""

from __future__ import annotations

from services.engine.domain.fence import Fence
from services.engine.domain.kept import Intent, Kept
from services.engine.domain.lends import Lend, LendState
from services.engine.domain.operations import Operation, Origin, Outcome
from services.engine.domain.weights import Update
from services.engine.wire.enums import CACHES, UPDATE_KINDS, WEIGHTS_STATES, EnumTable
from services.engine.wire.operations import read_operation, write_duration, write_operation, write_outcome
from services.engine.wire.replicas import read_gpu, read_spec, write_gpu, write_spec
from turnout.engine.storage.v1 import storage_pb2 as st

INTENTS = EnumTable(
    {st.INTENT_OUT: Intent.OUT, st.INTENT_HOLD: Intent.HOLD, st.INTENT_SERVE: Intent.SERVE},
)
LEND_STATES = EnumTable(
    {
        st.LEND_STATE_OPEN: LendState.OPEN,
        st.LEND_STATE_RECLAIMED: LendState.RECLAIMED,
        st.LEND_STATE_ABORTED: LendState.ABORTED,
    }
)


def write_fence(fence: Fence) -> st.Record:
    """The run and its epoch."""
    return st.Record(fence=st.Fence(run_id=fence.run_id, epoch=fence.epoch))


def write_kept(kept: Kept) -> st.Record:
    """A replica."""
    return st.Record(
        replica=st.ReplicaImage(
            spec=write_spec(kept.spec),
            weights=WEIGHTS_STATES.write(kept.weights),
            weight_version=kept.weight_version,
            adapter_version=kept.adapter_version,
            cache_version=kept.cache_version,
            stale_caches=sorted(CACHES.write(cache) for cache in kept.stale_caches),
            intent=INTENTS.write(kept.intent),
            lend_id=kept.lend_id,
            update_id=kept.update_id,
            update_kind=UPDATE_KINDS.write(kept.update_kind),
            unvacated=[write_gpu(gpu) for gpu in sorted(kept.unvacated)],
            must_load=kept.must_load,
            before_update=WEIGHTS_STATES.write(kept.before_update),
            released_kv=kept.released_kv,
            engine_incarnation=kept.engine_incarnation,
            declared_tags=sorted(kept.declared_tags),
            may_wake=kept.may_wake,
            may_sleep=kept.may_sleep,
            started_anew=kept.started_anew,
        )
    )


def read_kept(image: st.ReplicaImage) -> Kept:
    """A replica."""
    return Kept(
        spec=read_spec(image.spec),
        weights=WEIGHTS_STATES.read("weights", image.weights),
        weight_version=image.weight_version,
        adapter_version=image.adapter_version if image.HasField("adapter_version") else None,
        cache_version=image.cache_version,
        stale_caches=frozenset(CACHES.read("stale_caches", cache) for cache in image.stale_caches),
        intent=INTENTS.read("intent", image.intent),
        lend_id=image.lend_id,
        update_id=image.update_id,
        update_kind=UPDATE_KINDS.read("update_kind", image.update_kind),
        unvacated=frozenset(read_gpu(gpu) for gpu in image.unvacated),
        must_load=image.must_load,
        before_update=WEIGHTS_STATES.read("before_update", image.before_update),
        released_kv=image.released_kv,
        engine_incarnation=image.engine_incarnation,
        declared_tags=frozenset(image.declared_tags),
        may_wake=image.may_wake,
        may_sleep=image.may_sleep,
        started_anew=image.started_anew,
    )


def write_operation_image(operation: Operation) -> st.Record:
    """An operation as it is now."""
    image = st.OperationImage(operation=write_operation(operation))
    origin = operation.origin
    if origin is not None:
        image.origin.CopyFrom(st.Origin(call=origin.call, request_id=origin.request_id, fingerprint=origin.fingerprint))
    return st.Record(operation=image)


def read_operation_image(image: st.OperationImage) -> Operation:
    """An operation."""
    operation = read_operation(image.operation)
    if image.HasField("origin"):
        operation.origin = Origin(image.origin.call, image.origin.request_id, image.origin.fingerprint)
    return operation


def write_settled(operation: Operation, outcome: Outcome) -> st.Record:
    """An outcome of an operation."""
    return st.Record(settled=st.Settled(operation_id=operation.operation_id, outcome=write_outcome(outcome)))


def write_ended(operation: Operation) -> st.Record:
    """The end of an operation."""
    assert operation.duration is not None
    return st.Record(ended=st.Ended(operation_id=operation.operation_id, duration=write_duration(operation.duration)))


def write_lend(lend: Lend) -> st.Record:
    """A lend."""
    image = st.LendImage(lend_id=lend.lend_id, state=LEND_STATES.write(lend.state), replica_ids=lend.members)
    return st.Record(lend=image)


def read_lend(image: st.LendImage) -> Lend:
    """A lend."""
    return Lend(image.lend_id, LEND_STATES.read("state", image.state), tuple(image.replica_ids))


def write_update(update: Update) -> st.Record:
    """A weight update; its blackout is that so far."""
    return st.Record(
        update=st.UpdateImage(
            update_id=update.update_id,
            kind=UPDATE_KINDS.write(update.kind),
            weight_version=update.version,
            adapter=update.adapter,
            keep_requests=update.keep_requests,
            allow_older=update.allow_older,
            wave_index=update.wave_index,
            opened=sorted(update.opened),
            wave=sorted(update.wave),
            later=[st.Wave(replica_ids=wave) for wave in update.later],
            touched=sorted(update.touched),
            finished=sorted(update.finished),
            members=sorted(update.members),
            blackout=update.blackout,
            tokens_recomputed=update.tokens_recomputed,
            closed=update.closed,
            aborted=update.aborted,
            answered=update.answered,
        )
    )


def read_update(image: st.UpdateImage) -> Update:
    """A weight update; its blackout is that so far."""
    return Update(
        image.update_id,
        UPDATE_KINDS.read("kind", image.kind),
        image.weight_version,
        adapter=image.adapter,
        keep_requests=image.keep_requests,
        allow_older=image.allow_older,
        wave_index=image.wave_index,
        opened=frozenset(image.opened),
        wave=set(image.wave),
        later=[tuple(wave.replica_ids) for wave in image.later],
        touched=set(image.touched),
        finished=set(image.finished),
        members=set(image.members),
        blackout=image.blackout,
        tokens_recomputed=image.tokens_recomputed,
        closed=image.closed,
        aborted=image.aborted,
        answered=image.answered,
    )
