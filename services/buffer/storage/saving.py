"""Saving and restoring a run while calls are served.

Invariants: a checkpoint is the run as it was when the saving began; a restore takes effect at one moment, before which
the run is untouched and after which nothing of its old content is left; both give the event loop away every few
milliseconds.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import google_crc32c
from google.protobuf.timestamp_pb2 import Timestamp

from services.buffer.desk import Desk
from services.buffer.domain.config import RunConfig
from services.buffer.domain.depth import Counts
from services.buffer.domain.run import Run
from services.buffer.storage.checkpoint_file import damaged
from services.buffer.storage.checkpoints import Checkpoints
from services.buffer.storage.imaging import RunImaging
from services.buffer.storage.letting_go import let_go
from services.buffer.storage.pauses import Pauses
from services.buffer.storage.payload_parts import payload_parts
from services.buffer.storage.restoring import Restoring
from services.buffer.wire.config import config_from
from services.buffer.wire.scalars import timestamp
from services.buffer.wire.waits import counts_to
from services.runtime.collector import no_collections
from services.runtime.errors import Code, TurnoutError, aborted, already_exists, failed_precondition, unavailable
from services.runtime.logs import get_logger
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

# Groups entered between two looks at the time.
_PER_LOOK = 32
_log = get_logger("buffer")


async def save(desk: Desk, checkpoints: Checkpoints, run: Run, step: int, checkpoint_id: str) -> st.CheckpointEnd:
    """Write a checkpoint of the run as it is now; of an id that is taken with the same step, give that one.

    Raises ALREADY_EXISTS / CHECKPOINT_EXISTS, RESOURCE_EXHAUSTED / DISK_FULL, ABORTED / RUN_REPLACED.
    """
    async with checkpoints.lock(run.run_id):
        found = await checkpoints.find(run.run_id, checkpoint_id)
        if found is not None:
            if found.info.step != step:
                message = f"a checkpoint of this id was taken at step {found.info.step}"
                raise already_exists("CHECKPOINT_EXISTS", message, field="checkpoint_id", value=checkpoint_id)
            return found
        end = st.CheckpointEnd(run_id=run.run_id)
        end.info.checkpoint_id, end.info.step = checkpoint_id, step
        end.info.counts.CopyFrom(_counts(run))
        desk.hold(run, checkpoint_id)
        imaging = RunImaging(run)
        end.sampled_uncommitted.extend(imaging.sampled)
        try:
            async with checkpoints.writing(run.run_id, checkpoint_id) as sink:
                async for part in _parts(desk, run, imaging):
                    end.info.bytes += len(part.payload.data) + sum(group.small_bytes for group in part.groups.groups)
                    await sink.write(part)
                end.info.created_at.CopyFrom(_now(desk))
                await sink.write(st.Part(checkpoint=end))
                # What it holds was decided before it began; it must not survive what did not.
                await desk.durable()
                if desk.runs.get(run.run_id) is not run:
                    raise _replaced(run)
                await sink.finish()
        except BaseException:
            desk.unhold(run.run_id, checkpoint_id)
            raise
        finally:
            imaging.close()
        return end


async def _parts(desk: Desk, run: Run, imaging: RunImaging) -> AsyncIterator[st.Part]:
    pauses = Pauses()
    written: set[str] = set()
    for payloads, part in imaging.parts():
        try:
            for payload in payloads:
                if payload.id not in written:
                    written.add(payload.id)
                    async for data in payload_parts(desk.store, payload):
                        yield data
        except TurnoutError as error:
            if error.code is Code.NOT_FOUND and desk.runs.get(run.run_id) is not run:
                raise _replaced(run) from error
            raise
        finally:
            imaging.release(payloads)
        yield part
        await pauses.breathe()


def _replaced(run: Run) -> TurnoutError:
    return aborted("RUN_REPLACED", "the run was deleted or restored meanwhile", run_id=run.run_id)


def _now(desk: Desk) -> Timestamp:
    return timestamp(desk.clock.wall())


def _counts(run: Run) -> pb.GroupCounts:
    total = Counts()
    for partition in run.partitions.values():
        there = partition.index.counts
        total.pending += there.pending
        total.running += there.running
        total.finished += there.finished
        total.failed += there.failed
        total.sampled += there.sampled
    return counts_to(total)


async def restore(
    desk: Desk, checkpoints: Checkpoints, run: Run, checkpoint_id: str, record: st.Record
) -> pb.RestoreResponse:
    """Let a checkpoint take the place of the run's content. `record` has the id of the request.

    Raises NOT_FOUND / CHECKPOINT_NOT_FOUND, DATA_LOSS / CHECKPOINT_DAMAGED, FAILED_PRECONDITION /
    CHECKPOINT_INCOMPATIBLE naming the fields, RESOURCE_EXHAUSTED / DISK_FULL; then the run is as it was.
    """
    async with checkpoints.lock(run.run_id):
        end = await checkpoints.require(run.run_id, checkpoint_id)
        payloads = _Payloads(desk)
        try:
            with no_collections():
                async with desk.restoring:
                    answer = await _restore(desk, checkpoints, run, end, payloads, record)
        except BaseException:
            payloads.drop()
            raise
        await let_go(run)
        return answer


async def _restore(
    desk: Desk, checkpoints: Checkpoints, run: Run, end: st.CheckpointEnd, payloads: _Payloads, record: st.Record
) -> pb.RestoreResponse:
    step = end.info.step
    restoring = Restoring(run, desk.store, step)
    try:
        await _fill(desk, checkpoints, run, end, payloads, restoring)
        at = desk.moment()
        record.restored = True
        desk.record(run, record, at)
    except BaseException:
        restoring.abandon()
        raise
    desk.memory.forget_answers(run.run_id)
    answer = restoring.swap(desk.runs, at)
    # What is parked may be repeated on the new content.
    desk.replaced(run.run_id, unavailable("RUN_RESTORED", "the run was restored from a checkpoint", run_id=run.run_id))
    return answer


async def _fill(
    desk: Desk,
    checkpoints: Checkpoints,
    run: Run,
    end: st.CheckpointEnd,
    payloads: _Payloads,
    restoring: Restoring,
) -> None:
    step = end.info.step
    pauses = Pauses()
    desk.record(run, st.Record(restore_begun=step), desk.moment())
    async for part in checkpoints.parts(run.run_id, end.info.checkpoint_id):
        kind = part.WhichOneof("part")
        if kind == "payload":
            await payloads.take(part.payload)
            continue
        if kind == "run":
            check_compatible(run.state.config, config_from(part.run.config), end.info)
        elif kind == "groups":
            for group in part.groups.groups:
                payloads.rename(group)
        if kind in ("run", "groups"):
            desk.record(run, st.Record(restore_part=part), desk.moment())
            restoring.feed(part)
        await pauses.breathe()
    for number, _ in enumerate(restoring.build(desk.moment())):
        if number % _PER_LOOK == 0:
            await pauses.breathe()


class _Payloads:
    """Payload bytes of a checkpoint on their way into the store, under ids of their own."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        # Not ids that a decision makes: a replay of decisions would not come by them.
        self._prefix = f"restored-{secrets.token_hex(8)}"
        self._ids: dict[str, str] = {}

    async def take(self, part: st.PayloadPart) -> None:
        """Take bytes; those of one payload come together and in order."""
        if not part.offset:
            self._ids[part.ref.id] = f"{self._prefix}-{len(self._ids):x}"
            self._upload = self._desk.store.upload(self._ids[part.ref.id])
        await self._upload.write(part.data)
        if part.offset + len(part.data) == part.ref.size:
            await self._upload.finish()

    def rename(self, group: st.GroupImage) -> None:
        """Let a group name its payloads by their new ids."""
        if group.HasField("prompt"):
            self._rename(group.prompt)
        for placed in group.placed:
            self._rename(placed.payload)

    def _rename(self, payload: pb.Payload) -> None:
        if not payload.ref.store:
            new = self._ids.get(payload.ref.id)
            if new is None:
                raise damaged(f"the bytes of payload {payload.ref.id!r} are not in it")
            payload.ref.id = new

    def drop(self) -> None:
        """Nothing came of it."""
        for payload_id in self._ids.values():
            self._desk.store.delete(payload_id)


def check_compatible(now: RunConfig, then: RunConfig, info: pb.CheckpointInfo) -> None:
    """Raise FAILED_PRECONDITION / CHECKPOINT_INCOMPATIBLE if a checkpoint does not fit the run as it is configured now.

    What differs and fits is logged: the run's present configuration holds.
    """
    counts = info.counts
    present = counts.pending + counts.running + counts.finished + counts.failed + counts.sampled
    wrong: dict[str, str] = {}
    if now.trainer_mode is not then.trainer_mode:
        wrong["config.trainer_mode"] = f"{then.trainer_mode.name} then, {now.trainer_mode.name} now"
    if now.partitions != then.partitions:
        wrong["config.partitions"] = f"{_named(then)} then, {_named(now)} now"
    if present > now.caps.max_groups:
        wrong["config.caps.max_groups"] = f"{now.caps.max_groups}, and the checkpoint holds {present} groups"
    if info.bytes > now.caps.max_bytes:
        wrong["config.caps.max_bytes"] = f"{now.caps.max_bytes}, and the checkpoint holds {info.bytes} bytes"
    if wrong:
        reasons = "; ".join(f"{field} is {why}" for field, why in wrong.items())
        message = f"the checkpoint does not fit the run: {reasons}"
        raise failed_precondition(
            "CHECKPOINT_INCOMPATIBLE", message, field=",".join(wrong), checkpoint_id=info.checkpoint_id, **wrong
        )
    for field in ("train_batch_size", "staleness", "group_filter_metric", "refill", "partial_rollout", "max_attempts"):
        _log_difference(field, getattr(then, field), getattr(now, field))
    _log_difference("lease_times", then.lease_times, now.lease_times)
    _log_difference("caps", then.caps, now.caps)


def _log_difference(field: str, then: object, now: object) -> None:
    if then != now:
        _log.warning("restored under another configuration", field=field, checkpoint=str(then), now=str(now))


def _named(config: RunConfig) -> str:
    return ", ".join(f"{part.name} ({part.kind.name}, n = {part.group_size})" for part in config.partitions)


async def verify(checkpoints: Checkpoints, run_id: str, checkpoint_id: str) -> None:
    """Read a checkpoint and check every checksum, those of the payloads too. Raises DATA_LOSS / CHECKPOINT_DAMAGED."""
    crc = 0
    async for part in checkpoints.parts(run_id, checkpoint_id):
        if part.WhichOneof("part") == "payload":
            payload = part.payload
            crc = google_crc32c.extend(crc if payload.offset else 0, payload.data)
            if payload.offset + len(payload.data) == payload.ref.size and crc != payload.ref.crc32c:
                raise damaged(f"payload {payload.ref.id!r} has a wrong checksum")
