"""The book of a controller: what has to outlive it is taken down here, in the turn in which it changes.

Invariants: an image is written only if it differs from the one before; whoever tells of a change, and whoever asks an
engine for anything, awaits `durable` first. While the journal takes nothing, `durable` raises, so that no engine is
touched and nothing is answered, and the book remembers that it has to be written again as a whole: engines have gone
on meanwhile, so what the controller knows of them is worth more than what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf.message import Message

from services.engine.domain.fence import Fence
from services.engine.domain.kept import Kept
from services.engine.domain.lends import Lends
from services.engine.domain.operations import Operation, OperationLog, Outcome
from services.engine.domain.replica import Replica
from services.engine.domain.weights import Update, Updates
from services.engine.storage import images
from services.runtime.errors import unavailable
from services.runtime.idempotency import Answer, Answers
from services.runtime.journal import Journal, JournalState
from turnout.engine.storage.v1 import storage_pb2 as st

STREAM: Final = "engine"


class Book:
    """Everything that is kept of a controller. Without a journal nothing is."""

    def __init__(
        self, fence: Fence, operations: OperationLog, lends: Lends, updates: Updates, answers: Answers
    ) -> None:
        self._fence = fence
        self._operations = operations
        self._lends = lends
        self._updates = updates
        self._answers = answers
        self._journal: Journal | None = None
        self._replicas: dict[str, Kept] = {}
        self._removed: set[str] = set()
        self._behind = False
        self.compaction_due = asyncio.Event()

    def begin(self, journal: Journal, replicas: Iterable[Kept] = ()) -> None:
        """Write into this journal from now on; `replicas` are in it already."""
        self._journal = journal
        self._replicas = {kept.spec.replica_id: kept for kept in replicas}

    # ---------------------------------------------------------------------------------------------------- taking down

    def fence(self) -> None:
        """The run or its epoch changed."""
        self._append(images.write_fence(self._fence))

    def replica(self, replica: Replica) -> None:
        """A replica may have changed."""
        if self._journal is None:
            return
        kept = replica.kept
        if self._replicas.get(kept.spec.replica_id) != kept:
            self._replicas[kept.spec.replica_id] = kept
            self._append(images.write_kept(kept))

    def removed(self, replica_id: str) -> None:
        """A replica was deregistered."""
        self._replicas.pop(replica_id, None)
        self._removed.add(replica_id)
        self._append(st.Record(removed=replica_id))

    def operation(self, operation: Operation) -> None:
        """An operation begins, or goes on."""
        self._append(images.write_operation_image(operation))

    def settled(self, operation: Operation, outcome: Outcome) -> None:
        """A replica has its outcome."""
        self._append(images.write_settled(operation, outcome))

    def ended(self, operation: Operation) -> None:
        """An operation is over."""
        self._append(images.write_ended(operation))

    def lend(self, lend_id: str) -> None:
        """A lend changed."""
        self._append(images.write_lend(self._lends.get(lend_id)))

    def update(self, update: Update, blackout: float) -> None:
        """A weight update changed; `blackout` is its own so far, in domain seconds."""
        update.blackout = blackout
        self._append(images.write_update(update))

    def answer(self, call: str, request_id: str, answer: Answer) -> None:
        """A repeatable call was answered."""
        self._append(_answer(call, request_id, answer))

    async def durable(self) -> None:
        """Return once everything taken down so far is durable. Raises why it is not."""
        journal = self._journal
        if journal is None:
            return
        if self._behind:
            raise unavailable("JOURNAL_BEHIND", "what changed cannot be stored at present; the call may be repeated")
        if journal.durable_position < journal.position or journal.state is not JournalState.OPEN:
            await journal.tail()

    def _append(self, record: st.Record) -> None:
        journal = self._journal
        if journal is None:
            return
        if self._behind or journal.state is not JournalState.OPEN:
            self._behind = True
            return
        journal.append(STREAM, record.SerializeToString())
        if journal.compaction_due:
            self.compaction_due.set()

    # ----------------------------------------------------------------------------------------------------- as a whole

    def records(self) -> Iterator[st.Record]:
        """Images of everything, which stand for all records so far. May be read little by little."""
        yield images.write_fence(self._fence)
        for kept in list(self._replicas.values()):
            # One that was removed meanwhile is removed by a record after these.
            yield images.write_kept(self._replicas.get(kept.spec.replica_id, kept))
        for lend in list(self._lends.all):
            yield images.write_lend(lend)
        for update in list(self._updates.all):
            yield images.write_update(update)
        for operation in list(self._operations.all):
            yield images.write_operation_image(operation)
        for run_id in self._answers.runs():
            for request_id, answer in self._answers.kept(run_id):
                yield _answer(answer.call, request_id, answer)

    def write_again(self) -> None:
        """The journal takes records again: store everything, since some of it never was."""
        assert self._journal is not None
        self._behind = False
        for replica_id in self._removed - self._replicas.keys():
            self._append(st.Record(removed=replica_id))
        for record in self.records():
            self._append(record)


def _answer(call: str, request_id: str, answer: Answer) -> st.Record:
    value = answer.value
    assert isinstance(value, Message)
    image = st.AnswerImage(
        call=call,
        request_id=request_id,
        fingerprint=answer.fingerprint,
        at=answer.at,
        type=value.DESCRIPTOR.name,
        response=value.SerializeToString(),
    )
    return st.Record(answer=image)
