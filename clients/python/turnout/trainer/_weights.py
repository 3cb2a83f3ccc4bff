"""Weight transactions around the trainer's own moving of bytes.

Invariants: a transaction that was opened is committed or aborted, whatever the callback does; a replica that the
callback reports as failed, or that a helper could not reach, is never acknowledged; an update counts as done only if at
least one replica took it, and the others are named; one that did not take it holds up neither later waves nor the next
update.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from turnout.client import (
    Aborted,
    AsyncEngineClient,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PartialFailure,
    TurnoutError,
    Unavailable,
)
from turnout.client._payloads import Bytes
from turnout.client._retry import Backoff
from turnout.engine.v1 import engine_pb2

_log = logging.getLogger("turnout")

COSTS_ONLY_SPEED: Final = (Aborted, DataLoss, DeadlineExceeded, PartialFailure, Unavailable)
"""Engines that do not answer, answer late or break. Anything else is a fault of the trainer's own."""

_TRIES: Final = 5
"""Updates that no replica takes although one answers: it may have died under the first, and be back."""

_STANDALONE: Final = engine_pb2.REPLICA_ROLE_STANDALONE
_OK = (engine_pb2.OUTCOME_KIND_DONE, engine_pb2.OUTCOME_KIND_SKIPPED)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Replicas that wait for weights: what an `update_weights` callback is called with."""

    role: engine_pb2.ReplicaRole.ValueType
    """STANDALONE or HYBRID."""
    kind: engine_pb2.UpdateKind.ValueType
    """AWAKE: serving replicas, paused with their KV released. ASLEEP: hybrid replicas on the trainer's own GPUs."""
    replicas: tuple[engine_pb2.ReplicaLayout, ...]
    """The replicas of this wave, with their ranks and devices."""
    weight_version: int
    """Version to install: the step whose weights these are."""
    update_id: str
    """The transaction, for ExchangeRendezvous and UpdateWeights."""
    wave_index: int = 0
    """Number of the wave."""
    restoring: bool = False
    """Whether they lost the weights while the trainer waits for groups: the version is the one that the others serve.
    After the first mini-batch of a step a trainer without `can_reinstall` is asked only while nothing serves; it then
    moves the weights that it has, under that version."""

    @property
    def replica_ids(self) -> list[str]:
        """Ids of the replicas."""
        return [replica.replica_id for replica in self.replicas]

    @property
    def gpus(self) -> list[engine_pb2.Gpu]:
        """Devices of all ranks."""
        return [rank.gpu for replica in self.replicas for rank in replica.ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What an `update_weights` callback may return. Returning None means: everything arrived."""

    failed: Collection[str] = ()
    """Replicas that did not get all weights."""
    bytes_free: Mapping[str, int] = field(default_factory=dict)
    """ASLEEP only: bytes free by device UUID after the trainer left it; without an entry 0 is reported."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Checksums by replica, compared where the engine offers one."""


UpdateWeights = Callable[[WeightTarget], Moved | Awaitable[Moved | None] | None]
"""Moves the weights to one wave of replicas, and leaves the devices of ASLEEP ones before it returns."""


@dataclass(slots=True)
class Installed:
    """How a weight update went."""

    seconds: float
    """Wall time of the whole transaction."""
    failed: list[str] = field(default_factory=list)
    """Replicas that did not take the weights."""
    tokens_recomputed: int = 0
    """Tokens of requests that ran, to be computed again."""
    blackout_seconds: float = 0.0
    """Domain time during which no replica served."""


@dataclass(slots=True)
class _Reached:
    """Which replicas took a version so far (whether any did, and those that did not), and what that cost requests."""

    some: bool = False
    failed: set[str] = field(default_factory=set)
    tokens_recomputed: int = 0
    blackout_seconds: float = 0.0


class WeightUpdates:
    """Runs weight transactions of one run at its engine controller."""

    def __init__(
        self,
        engine: AsyncEngineClient,
        *,
        run_id: str,
        epoch: int,
        staggered: bool,
        in_flight: engine_pb2.InFlight.ValueType,
    ) -> None:
        self._engine = engine
        self._run_id = run_id
        self._epoch = epoch
        self._staggered = staggered
        self._in_flight = in_flight
        self._unreached: dict[str, set[str]] = {}
        self._moves: dict[tuple[str, int], Counter[str]] = {}
        """How many moves went through the controller to each replica, by update and wave."""

    async def install_standalone(
        self, update_weights: UpdateWeights, *, version: int, allow_older: bool, patience: float | None
    ) -> Installed | None:
        """Bring `version` to the standalone replicas, as soon as one of them takes it.

        While none answers it waits for one, `patience` wall seconds at most, and raises the last error then; None:
        returns None. Raises the error as well if replicas answer and none of them takes it, again and again.
        """
        link, ends, tries = self._engine.link, None, 0
        backoff = Backoff(self._engine.options.retry, random.Random())
        while True:
            try:
                return await self.install(update_weights, role=_STANDALONE, version=version, allow_older=allow_older)
            except (*COSTS_ONLY_SPEED, FailedPrecondition) as error:
                if isinstance(error, FailedPrecondition) and error.reason != "NO_REPLICA":
                    raise
                if await self._any_answers():
                    tries += 1
                    if tries == _TRIES:
                        raise
                elif patience is None:
                    _log.warning("no standalone replica answers that could take version %d: %s", version, error)
                    return None
                elif ends is None:
                    _log.warning("version %d waits for a standalone replica: %s", version, error)
                    ends = link.now() + patience
                elif link.now() >= ends:
                    raise
            await link.sleep(backoff.next())

    async def _any_answers(self) -> bool:
        request = engine_pb2.ListReplicasRequest(run_id=self._run_id)
        replicas = (await self._engine.calls.ListReplicas(request)).replicas
        healthy = engine_pb2.REPLICA_HEALTH_HEALTHY
        return any(one.spec.role == _STANDALONE and one.health == healthy for one in replicas)

    async def install(
        self,
        update_weights: UpdateWeights,
        *,
        role: engine_pb2.ReplicaRole.ValueType,
        replica_ids: Sequence[str] = (),
        version: int,
        allow_older: bool = False,
        restoring: bool = False,
    ) -> Installed:
        """Bring `version` to replicas. Raises what the callback raises, after the transaction was aborted."""
        began = self._engine.link.now()
        hybrid = role == engine_pb2.REPLICA_ROLE_HYBRID
        request = engine_pb2.BeginWeightUpdateRequest(
            run_id=self._run_id,
            epoch=self._epoch,
            selector=engine_pb2.ReplicaSelector(replica_ids=replica_ids, roles=[role]),
            kind=engine_pb2.UPDATE_KIND_ASLEEP if hybrid else engine_pb2.UPDATE_KIND_AWAKE,
            in_flight=self._in_flight,
            staggered=self._staggered and not hybrid,
            weight_version=version,
            allow_older=allow_older,
        )
        reached = _Reached()
        later = await self._transaction(request, update_weights, reached, restoring=restoring)
        if later:
            request.selector.replica_ids[:] = later
            request.staggered = False
            await self._transaction(request, update_weights, reached, restoring=restoring)
        if reached.failed:
            _log.warning("version %d did not reach replicas %s", version, ", ".join(sorted(reached.failed)))
        return Installed(
            self._engine.link.now() - began, sorted(reached.failed), reached.tokens_recomputed, reached.blackout_seconds
        )

    async def _transaction(
        self,
        request: engine_pb2.BeginWeightUpdateRequest,
        update_weights: UpdateWeights,
        reached: _Reached,
        *,
        restoring: bool,
    ) -> list[str]:
        """Run one transaction, and add to `reached`; the replicas of later waves if a failure ended it early."""
        opened = await self._engine.calls.BeginWeightUpdate(request)
        reached.failed.update(_failed(opened.operation))
        wave, index, later = list(opened.wave), opened.wave_index, list(opened.remaining)
        role = request.selector.roles[0]
        commit = engine_pb2.CommitWeightUpdateResponse()
        try:
            while wave:
                target = WeightTarget(
                    role, request.kind, tuple(wave), request.weight_version, opened.update_id, index, restoring
                )
                answer = await self._engine.link.invoke(update_weights, target)
                commit = await self._commit(target, answer or Moved(), needed=not (reached.some or later))
                reached.failed.update(_failed(commit.operation))
                cut_short = not (commit.complete or commit.wave)
                reached.some |= not cut_short or _any_took_it(commit.operation)
                if commit.complete:
                    break
                if cut_short:
                    # Who did not take it holds the transaction open, and would be refused a place in the next one.
                    await self._abort(opened.update_id)
                    return later
                wave, index, later = list(commit.wave), commit.next_wave_index, list(commit.remaining)
        except BaseException:
            await self._abort(opened.update_id)
            raise
        finally:
            self._unreached.pop(opened.update_id, None)
            self._moves.clear()
            # Of the whole transaction: each answer counts in those before it.
            reached.tokens_recomputed += commit.tokens_recomputed
            reached.blackout_seconds += commit.blackout.ToMicroseconds() / 1e6
        return []

    async def move_bytes(self, target: WeightTarget, data: Bytes | Sequence[Bytes], *, info_json: str = "") -> None:
        """Send weights through the controller to a target, or to some of its replicas, in chunks with a checksum.

        It may be called several times, one after the other. Replicas that could not be reached are remembered and not
        acknowledged at the commit. A move that raised is not counted: the next one takes its place.
        """
        made = self._moves.setdefault((target.update_id, target.wave_index), Counter())
        numbered: dict[int, list[str]] = {}
        for replica_id in target.replica_ids:
            numbered.setdefault(made[replica_id], []).append(replica_id)
        for move_index, replica_ids in numbered.items():
            operation = await self._engine.send_weights(
                self._run_id,
                target.update_id,
                data,
                epoch=self._epoch,
                replica_ids=replica_ids,
                wave_index=target.wave_index,
                move_index=move_index,
                info_json=info_json,
            )
            self._unreached.setdefault(target.update_id, set()).update(_failed(operation))
        made.update(target.replica_ids)

    async def _commit(
        self, target: WeightTarget, moved: Moved, *, needed: bool
    ) -> engine_pb2.CommitWeightUpdateResponse:
        """Commit a wave. `needed`: raises PartialFailure if no replica of it took the version."""
        calls = self._engine.calls
        if target.kind == engine_pb2.UPDATE_KIND_ASLEEP and target.gpus:
            vacated = [engine_pb2.Vacated(gpu=gpu, bytes_free=moved.bytes_free.get(gpu.uuid, 0)) for gpu in target.gpus]
            await calls.ReportVacated(
                engine_pb2.ReportVacatedRequest(
                    run_id=self._run_id, epoch=self._epoch, update_id=target.update_id, vacated=vacated
                )
            )
        failed = set(moved.failed) | self._unreached.pop(target.update_id, set())
        request = engine_pb2.CommitWeightUpdateRequest(
            run_id=self._run_id,
            epoch=self._epoch,
            update_id=target.update_id,
            wave_index=target.wave_index,
            acks=[
                engine_pb2.UpdateAck(
                    replica_id=replica_id, ok=replica_id not in failed, checksum=moved.checksums.get(replica_id, "")
                )
                for replica_id in target.replica_ids
            ],
        )
        try:
            return await calls.CommitWeightUpdate(request)
        except PartialFailure as error:
            operation = await self._operation(error)
            if needed and not _any_took_it(operation):
                raise
            return engine_pb2.CommitWeightUpdateResponse(operation=operation)

    async def _operation(self, error: PartialFailure) -> engine_pb2.Operation:
        request = engine_pb2.GetOperationRequest(run_id=self._run_id, operation_id=error.operation_id)
        return (await self._engine.calls.GetOperation(request)).operation

    async def _abort(self, update_id: str) -> None:
        request = engine_pb2.AbortWeightUpdateRequest(run_id=self._run_id, epoch=self._epoch, update_id=update_id)
        try:
            await self._engine.calls.AbortWeightUpdate(request)
        except TurnoutError as error:
            # What went wrong before matters more; a newer epoch aborts what is left open.
            _log.warning("weight update %s was not aborted: %s", update_id, error)


def _any_took_it(operation: engine_pb2.Operation) -> bool:
    return any(outcome.kind in _OK for outcome in operation.outcomes)


def _failed(operation: engine_pb2.Operation) -> list[str]:
    return [outcome.replica_id for outcome in operation.outcomes if outcome.kind not in _OK]
