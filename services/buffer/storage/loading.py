"""Loading: what an earlier process knew, read back from its journal.

Invariant: what is loaded is checked before anything is served: every ledger balances, and every count is that of the
groups.
"""

from services.buffer.domain.group import GroupState
from services.buffer.domain.ids import Ids
from services.buffer.domain.moment import Moment
from services.buffer.domain.payloads import PayloadBook, PayloadStore
from services.buffer.domain.run import Run
from services.buffer.memory import Memory
from services.buffer.storage.building import PayloadsArriving, RunBuilder
from services.buffer.storage.externals import read_externals
from services.buffer.storage.images import read_event
from services.buffer.storage.replay import Replay
from services.buffer.wire.config import config_from
from services.runtime.errors import TurnoutError, data_loss
from services.runtime.journal import Journal
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb


class SnapshotReader:
    """Fills a memory from the parts of a snapshot."""

    def __init__(self, memory: Memory, store: PayloadStore) -> None:
        self._memory = memory
        self._store = store
        self._arriving = PayloadsArriving(store)
        self._builder: RunBuilder | None = None

    def feed(self, part: st.Part) -> None:
        """Take the next part."""
        kind = part.WhichOneof("part")
        if kind == "begin":
            self._memory.now, self._memory.created = part.begin.now, part.begin.created
        elif kind == "run":
            self._begin(part.run)
        elif kind == "answers":
            self._answers(part.answers)
        elif kind == "externals":
            read_externals(part.externals, self._memory.externals.of(part.externals.run_id))
        else:
            self._part_of_run(str(kind), part)

    def _begin(self, image: st.RunImage) -> None:
        now = self._memory.now
        run = Run(
            image.run_id,
            config_from(image.config),
            id_prefix=image.id_prefix,
            store=self._store,
            at=Moment(now, image.created_at),
        )
        external = self._memory.externals.of(image.run_id)
        run.state.ids = Ids(image.id_prefix, image.next_id)
        run.state.payloads = PayloadBook(self._store, run.state.ids, external)
        self._builder = RunBuilder(run)
        self._builder.head(image, now=now)

    def _part_of_run(self, kind: str, part: st.Part) -> None:
        builder = self._builder
        assert builder is not None
        match kind:
            case "groups":
                builder.groups(part.groups)
            case "claims":
                builder.claims(part.claims.claims)
            case "leases":
                builder.leases(part.leases.leases)
            case "payload":
                self._arriving.feed(part.payload)
            case "events":
                builder.run.state.events.restore(map(read_event, part.events.events))
            case "run_end":
                self._memory.runs.add(builder.finish(self._memory.now))
                self._builder = None

    def _answers(self, image: st.AnswersImage) -> None:
        """Answers of the run that is being read come before its end, those of no run after the last."""
        for answer in image.answers:
            value: object
            if answer.call == "ClaimGroups":
                value = tuple(answer.claims)
            else:
                value = getattr(pb, f"{answer.call}Response").FromString(answer.response)
            self._memory.answers[answer.call].remember(
                image.run_id, answer.call, answer.request_id, answer.fingerprint, answer.at, value
            )


async def load(journal: Journal, store: PayloadStore) -> Memory:
    """All that the journal knows. Raises DATA_LOSS with `last_good_position`."""
    memory = Memory()
    position = journal.snapshot_position
    try:
        reader = SnapshotReader(memory, store)
        async for chunk in journal.read_snapshot():
            reader.feed(st.Part.FromString(chunk))
        replay = Replay(memory, store)
        async for record in journal.replay():
            replay.apply(record.stream, st.Record.FromString(record.payload))
            position = record.position
    except TurnoutError as error:
        if "last_good_position" in error.metadata:
            raise
        raise _unsound(f"record {position + 1} cannot be applied: {error}", position) from error
    except (KeyError, ValueError, AssertionError) as error:
        raise _unsound(f"record {position + 1} cannot be applied: {error!r}", position) from error
    for run in memory.runs:
        _verify(run, position)
    return memory


def _verify(run: Run, position: int) -> None:
    for name, partition in run.partitions.items():
        ledger = partition.ledger()
        if not ledger.balanced:
            raise _unsound(f"the ledger of partition {name!r} of run {run.run_id!r} does not balance", position)
        states = [group.state for group in partition.groups.values()]
        there = ledger.present
        counted = (there.pending, there.running, there.finished, there.failed, there.sampled)
        kinds = (GroupState.PENDING, GroupState.RUNNING, GroupState.FINISHED, GroupState.FAILED, GroupState.SAMPLED)
        if counted != tuple(states.count(kind) for kind in kinds):
            raise _unsound(
                f"the counts of partition {name!r} of run {run.run_id!r} are not those of its groups", position
            )


def _unsound(message: str, position: int) -> TurnoutError:
    return data_loss("JOURNAL_DAMAGED", f"{message}; the last good position is {position}", last_good_position=position)
