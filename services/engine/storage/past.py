"""What an earlier controller knew, read back from its journal.

Invariant: what cannot be read is DATA_LOSS with the last good position, and nothing is served.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from services.engine.domain.kept import Kept
from services.engine.domain.lends import Lend
from services.engine.domain.operations import Operation
from services.engine.domain.weights import Update
from services.engine.storage import images
from services.engine.wire.operations import read_outcome
from services.runtime.errors import TurnoutError, data_loss
from services.runtime.idempotency import Answer
from services.runtime.journal import Journal
from turnout.engine.storage.v1 import storage_pb2 as st
from turnout.engine.v1 import engine_pb2 as pb


@dataclass(slots=True)
class Past:
    """Everything, by id and in the order in which it came up."""

    run_id: str = ""
    epoch: int = 0
    replicas: dict[str, Kept] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    lends: dict[str, Lend] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)

    def apply(self, record: st.Record) -> None:
        """Take the next record. Raises KeyError, TurnoutError for one that does not fit."""
        match record.WhichOneof("record"):
            case "fence":
                self.run_id, self.epoch = record.fence.run_id, record.fence.epoch
            case "replica":
                kept = images.read_kept(record.replica)
                self.replicas[kept.spec.replica_id] = kept
            case "removed":
                self.replicas.pop(record.removed, None)
            case "operation":
                operation = images.read_operation_image(record.operation)
                self.operations[operation.operation_id] = operation
            case "settled":
                # Set, not settled: a snapshot may hold later outcomes of an operation that was gone on with.
                outcome = read_outcome(record.settled.outcome)
                self.operations[record.settled.operation_id].outcomes[outcome.replica_id] = outcome
            case "ended":
                self.operations[record.ended.operation_id].end(record.ended.duration.ToMicroseconds() / 1e6)
            case "lend":
                lend = images.read_lend(record.lend)
                self.lends[lend.lend_id] = lend
            case "update":
                update = images.read_update(record.update)
                self.updates[update.update_id] = update
            case "answer":
                image = record.answer
                answered: pb.SleepResponse = getattr(pb, image.type).FromString(image.response)
                # Taken out first: the newest is the last.
                self.answers.pop((image.call, image.request_id), None)
                self.answers[image.call, image.request_id] = Answer.of(
                    image.call, image.fingerprint, image.at, answered
                )
            case unknown:
                raise KeyError(unknown)


async def read_past(journal: Journal) -> Past:
    """All that the journal knows. Raises DATA_LOSS / JOURNAL_DAMAGED with `last_good_position`."""
    past = Past()
    position = journal.snapshot_position
    try:
        async for chunk in journal.read_snapshot():
            _apply(past, st.Records.FromString(chunk).records)
        async for record in journal.replay():
            past.apply(st.Record.FromString(record.payload))
            position = record.position
    except TurnoutError as error:
        if "last_good_position" in error.metadata:
            raise
        raise _unsound(error.message, position) from error
    except (KeyError, ValueError, AttributeError, DecodeError) as error:
        raise _unsound(repr(error), position) from error
    return past


def _apply(past: Past, records: Iterable[st.Record]) -> None:
    for record in records:
        past.apply(record)


def _unsound(why: str, position: int) -> TurnoutError:
    message = f"record {position + 1} cannot be applied: {why}; the last good position is {position}"
    return data_loss("JOURNAL_DAMAGED", message, last_good_position=position)
