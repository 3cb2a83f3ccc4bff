"""Replay: the decisions of earlier processes, made again.

Invariants: the same domain functions run as when the decision was made, at the moment that was recorded, so ids and
answers come out the same; nobody waits during a replay, so what waits caused was recorded as decisions of its own.
"""

import math
from collections.abc import Callable

from services.buffer import commands
from services.buffer.domain.config import RunConfig
from services.buffer.domain.expiry import Expired, expire
from services.buffer.domain.external import ExternalBook
from services.buffer.domain.moment import Moment
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.pump import LeaseSpec, take_lease
from services.buffer.domain.run import Run
from services.buffer.memory import Memory
from services.buffer.storage.restoring import Restoring
from services.buffer.wire.config import config_from, run_to
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

Apply = Callable[["Replay", Run, st.Record, Moment], object]

# The call that a decision answered, where repeats get that answer again.
_CALLS = {
    "create_run": "CreateRun",
    "delete_run": "DeleteRun",
    "update_run": "UpdateRun",
    "open_epoch": "OpenEpoch",
    "add_groups": "AddGroups",
    "claim": "ClaimGroups",
    "finish_trajectories": "FinishTrajectories",
    "fail_trajectories": "FailTrajectories",
    "finish_group": "FinishGroup",
    "fail_group": "FailGroup",
    "evict_groups": "EvictGroups",
    "set_intake": "SetIntake",
    "restored": "Restore",
}


class Replay:
    """Applies records to a memory."""

    def __init__(self, memory: Memory, store: PayloadStore) -> None:
        self.memory = memory
        self.store = store
        self._restoring: dict[str, Restoring] = {}

    def apply(self, run_id: str, record: st.Record) -> None:
        """Make one decision again."""
        at = Moment(record.now, record.wall)
        self.memory.now = max(self.memory.now, at.now)
        kind = record.WhichOneof("decision")
        if kind == "boot":
            for run in self.memory.runs:
                run.restart(run_prefix(record.boot.id_prefix, run), at)
            self._restoring.clear()
            return
        if kind in _EXTERNAL:
            _EXTERNAL[kind](self.memory.externals.of(run_id), record)
            if self.memory.runs.get(run_id) is None:
                self.memory.externals.discard_empty(run_id)
            return
        if kind == "create_run":
            answer: object = self._create(run_id, record.create_run, at)
        else:
            answer = _APPLY[str(kind)](self, self.memory.runs.require(run_id), record, at)
        if record.request_id:
            call = _CALLS[str(kind)]
            key = "" if kind == "delete_run" else run_id
            self.memory.answers[call].remember(key, call, record.request_id, record.fingerprint, at.now, answer)

    def _create(self, run_id: str, said: st.CreateRun, at: Moment) -> pb.CreateRunResponse:
        self.memory.created += 1
        external = self.memory.externals.of(run_id)
        config = config_from(said.config)
        run = Run(run_id, config, id_prefix=said.id_prefix, store=self.store, at=at, external=external)
        self.memory.runs.add(run)
        return pb.CreateRunResponse(run=run_to(run))

    def delete(self, run: Run) -> pb.DeleteRunResponse:
        """Forget a run."""
        self.memory.runs.remove(run)
        run.clear()
        self.memory.externals.discard_empty(run.run_id)
        self.memory.forget_answers(run.run_id)
        self._restoring.pop(run.run_id, None)
        return pb.DeleteRunResponse()

    def begin_restore(self, run: Run, step: int) -> None:
        """Collect the parts that follow."""
        self._restoring[run.run_id] = Restoring(run, self.store, step)

    def restore_part(self, run: Run, part: st.Part) -> None:
        """Take one part of the image."""
        self._restoring[run.run_id].feed(part)

    def restored(self, run: Run, at: Moment) -> pb.RestoreResponse:
        """Let the image take the run's place."""
        self.memory.forget_answers(run.run_id)
        restoring = self._restoring.pop(run.run_id)
        for _ in restoring.build(at):
            pass
        answer = restoring.swap(self.memory.runs, at)
        run.clear()
        return answer


def run_prefix(boot_prefix: str, run: Run) -> str:
    """The prefix of the ids that a run makes after a boot: runs differ in the number of their creation."""
    return f"{boot_prefix}.{run.state.ids.prefix.rpartition('.')[2]}"


def _update(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    config: RunConfig = config_from(record.update_run)
    run.update(config)
    return pb.UpdateRunResponse(run=run_to(run))


def _open_epoch(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    returned, _ = run.open_epoch(record.open_epoch, at)
    return pb.OpenEpochResponse(epoch=run.state.epoch, returned_groups=returned)


def _finish(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    request = pb.FinishTrajectoriesRequest.FromString(record.finish_trajectories)
    outcomes = commands.finish(run.partition(request.partition), request.results, at)
    return pb.FinishTrajectoriesResponse(outcomes=outcomes)


def _finish_batch(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    batch = pb.FinishStreamBatch.FromString(record.finish_batch.batch)
    return commands.finish(run.partition(record.finish_batch.partition), batch.results, at)


def _evict_due(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    said = record.evict_due
    partition = run.partition(said.partition)
    if said.group_ids:
        partition.evict_listed(said.step, said.group_ids, at)
        return None
    return partition.evict_due(said.step, at)


def _lease(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    said = record.lease
    spec = LeaseSpec(said.step, said.batch, record.request_id, record.fingerprint, said.auto_commit)
    # A repeat finds it in the book of leases.
    record.request_id = ""
    return take_lease(run.partition(said.partition), spec, at)


def _show(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    # Shown to nobody who lives; the boot that follows shows it anew.
    return run.partition(record.show_refill).refill.show(0, run.state.ids, math.inf)


def _expire(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    said = record.expire
    over = Expired(list(said.claims), list(said.leases), list(said.retained), list(said.uploads))
    for lease_id in over.leases:
        run.state.leases.deadlines.discard(lease_id)
    return expire(run, over, at)


def _upload(replay: Replay, run: Run, record: st.Record, at: Moment) -> object:
    said = record.upload
    until = at.now + run.state.config.lease_times.payload
    return run.state.payloads.uploaded(said.payload_id, said.size, said.crc32c, until)


# Decisions on external payloads, whose run may be gone.
_EXTERNAL: dict[str | None, Callable[[ExternalBook, st.Record], object]] = {
    "hold": lambda book, record: book.hold(record.hold),
    "unhold": lambda book, record: book.unhold(record.unhold),
    "ack": lambda book, record: book.acknowledge(record.ack.store, record.ack.ids),
}
_APPLY: dict[str, Apply] = {
    "delete_run": lambda replay, run, record, at: replay.delete(run),
    "update_run": _update,
    "open_epoch": _open_epoch,
    "step": lambda replay, run, record, at: run.contact(at, record.step),
    "add_groups": lambda replay, run, record, at: commands.add_groups(
        run, pb.AddGroupsRequest.FromString(record.add_groups), at
    ),
    "claim": lambda replay, run, record, at: commands.claim(run.partition(record.claim.partition), record.claim, at),
    "finish_trajectories": _finish,
    "finish_batch": _finish_batch,
    "fail_trajectories": lambda replay, run, record, at: commands.fail(
        run, pb.FailTrajectoriesRequest.FromString(record.fail_trajectories), at
    ),
    "finish_group": lambda replay, run, record, at: commands.finish_group(
        run, pb.FinishGroupRequest.FromString(record.finish_group), at
    ),
    "fail_group": lambda replay, run, record, at: commands.fail_group(
        run, pb.FailGroupRequest.FromString(record.fail_group), at
    ),
    "evict_groups": lambda replay, run, record, at: commands.evict_groups(
        run, pb.EvictGroupsRequest.FromString(record.evict_groups), at
    ),
    "set_intake": lambda replay, run, record, at: commands.set_intake(
        run, pb.SetIntakeRequest.FromString(record.set_intake)
    ),
    "decline_refill": lambda replay, run, record, at: commands.decline_refill(
        run, pb.DeclineRefillRequest.FromString(record.decline_refill)
    ),
    "evict_due": _evict_due,
    "show_refill": _show,
    "lease": _lease,
    "seal": lambda replay, run, record, at: run.partition(record.seal).evictions.cursor(),
    "commit": lambda replay, run, record, at: run.commit(record.commit, at),
    "release": lambda replay, run, record, at: run.release(record.release, at),
    "release_payload": lambda replay, run, record, at: run.release_payload(record.release_payload),
    "expire": _expire,
    "upload": _upload,
    "restore_begun": lambda replay, run, record, at: replay.begin_restore(run, record.restore_begun),
    "restore_part": lambda replay, run, record, at: replay.restore_part(run, record.restore_part),
    "restored": lambda replay, run, record, at: replay.restored(run, at),
}
