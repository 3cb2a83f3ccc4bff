"""Restoring: a checkpoint that takes the place of a run's content.

Invariants: the run stays as it is until `swap`, and afterwards nothing of its old content is left but what outlives
it: configuration, epoch, paused intake, ids, and the numbers of events and arrivals, which only rise; pending groups
are born again at the restored step.
"""

from collections.abc import Iterator

from services.buffer.domain.depth import Counts
from services.buffer.domain.events import GroupEventKind
from services.buffer.domain.moment import Moment
from services.buffer.domain.payloads import PayloadBook, PayloadStore
from services.buffer.domain.run import Run
from services.buffer.domain.runs import Runs
from services.buffer.storage.building import RunBuilder
from services.buffer.wire.waits import counts_to
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


class Restoring:
    """The new content of `old`."""

    def __init__(self, old: Run, store: PayloadStore, step: int) -> None:
        self._old = old
        self._step = step
        state = old.state
        at = Moment(state.contact_at, old.created_at)
        self.run = Run(old.run_id, state.config, id_prefix=state.ids.prefix, store=store, at=at)
        self.run.state.ids = state.ids
        self.run.state.payloads = PayloadBook(store, state.ids, state.payloads.external)
        self._builder = RunBuilder(self.run)

    def feed(self, part: st.Part) -> None:
        """Take one part of the checkpoint's image, its payloads being in the store already."""
        match part.WhichOneof("part"):
            case "run":
                self._builder.head(part.run, now=self._old.state.contact_at)
            case "groups":
                for group in part.groups.groups:
                    if group.state == pb.GROUP_STATE_PENDING:
                        group.born = self._step
                self._builder.groups(part.groups)

    def build(self, at: Moment) -> Iterator[None]:
        """Build the new content in small steps."""
        yield from self._builder.steps(at.now)

    def abandon(self) -> None:
        """Nothing comes of it."""
        self.run.state.payloads.let_external_go()

    def swap(self, runs: Runs, at: Moment) -> pb.RestoreResponse:
        """Put the new content in place; the payloads of the old in the own store are left to the caller."""
        old, state = self._old, self.run.state
        state.epoch, state.events, state.step = old.state.epoch, old.state.events, self._step
        state.events.append(GroupEventKind.RESTORED, "", "", self._step, at.wall)
        state.config = old.state.config
        state.sequence = max(state.sequence, old.state.sequence)
        state.contact_at = at.now
        counts = Counts()
        for partition in self.run.partitions.values():
            partition.intake_paused = old.partitions[partition.name].intake_paused
            refill = partition.refill
            refill.free = refill.unpaid
            refill.restore([], [*refill.ended(), *(claim.claim_id for claim in refill.claims())])
            there = partition.index.counts
            counts.pending += there.pending
            counts.finished += there.finished
            counts.failed += there.failed
        runs.replace(self.run)
        old.state.payloads.let_external_go()
        training = [partition for partition in self.run.partitions.values() if partition.training]
        cursor = training[0].evictions.cursor() if training else 0
        return pb.RestoreResponse(counts=counts_to(counts), step=self._step, cursor=cursor)
