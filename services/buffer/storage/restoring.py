"""Restoring: a checkpoint that takes the place of a run's content.

Invariants: the run stays as it is until `finish`, and afterwards nothing of its old content is left but what outlives
it: configuration, epoch, ids, and the numbers of events and arrivals, which only rise; pending groups are born again at
the restored step.
"""

from services.buffer.domain.depth import Counts
from services.buffer.domain.group import GroupState
from services.buffer.domain.moment import Moment
from services.buffer.domain.payloads import PayloadBook, PayloadStore
from services.buffer.domain.run import Run
from services.buffer.domain.runs import Runs
from services.buffer.storage.building import PayloadsArriving, RunBuilder
from services.buffer.wire.waits import counts_to
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


class Restoring:
    """The new content of `old`."""

    def __init__(self, old: Run, store: PayloadStore) -> None:
        self._old = old
        state = old.state
        at = Moment(state.contact_at, old.created_at)
        run = Run(old.run_id, state.config, id_prefix=state.ids.prefix, store=store, at=at)
        run.state.ids = state.ids
        run.state.payloads = PayloadBook(store, state.ids)
        self._builder = RunBuilder(run)
        self._arriving = PayloadsArriving(store)

    def feed(self, part: st.Part) -> None:
        """Take one part of the checkpoint's image."""
        match part.WhichOneof("part"):
            case "run":
                self._builder.head(part.run, now=self._old.state.contact_at)
            case "groups":
                self._builder.groups(part.groups)
            case "payload":
                self._arriving.feed(part.payload)

    def drop(self) -> None:
        """Nothing will come of it: let the bytes go that were kept for it."""
        self._builder.finish(0.0).clear()

    def finish(self, runs: Runs, step: int, at: Moment) -> pb.RestoreResponse:
        """Put the new content in place."""
        old = self._old
        run = self._builder.finish(at.now)
        state = run.state
        state.epoch, state.events, state.step = old.state.epoch, old.state.events, step
        state.sequence = max(state.sequence, old.state.sequence)
        state.contact_at = at.now
        counts = Counts()
        for partition in run.partitions.values():
            refill = partition.refill
            refill.free = refill.unpaid
            refill.restore([], [*refill.ended(), *(claim.claim_id for claim in refill.claims())])
            for group in list(partition.groups.values()):
                if group.state is GroupState.PENDING:
                    partition.index.leave(group)
                    group.born = step
                    partition.index.enter(group)
            there = partition.index.counts
            counts.pending += there.pending
            counts.finished += there.finished
            counts.failed += there.failed
        # Payloads of the checkpoint came back under new ids, so this takes none of them.
        old.clear()
        runs.replace(run)
        cursors = {partition.training: partition.evictions.cursor() for partition in [*run.partitions.values()][::-1]}
        cursor = cursors.get(True, 0)
        return pb.RestoreResponse(counts=counts_to(counts), step=step, cursor=cursor)
