"""Loading: what earlier processes knew of their runs, read back from the journal.

Invariants: states are those that were written last, events those that are kept; a policy sees every event that it saw
before, in the same order, from the last image of it on, so it decides as it would have; what cannot be read is
DATA_LOSS with the last good position and never an empty memory. An image of a policy that another version of the
program wrote is no damage: its policy learns again from the events that are kept.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import cast

from google.protobuf.message import DecodeError

from services.runtime.errors import TurnoutError, data_loss
from services.runtime.journal import Journal
from services.runtime.logs import get_logger
from services.scheduler.convert_events import event_from_proto
from services.scheduler.domain import events
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.feed import PolicyFeed
from services.scheduler.domain.learner import Learner
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.run import SavedState, recall
from services.scheduler.packing import PACKING
from services.scheduler.policies.base import Policy
from services.scheduler.policies.errors import FieldError
from services.scheduler.storage import policy_image
from turnout.scheduler.storage.v1 import storage_pb2 as st

_log = get_logger("scheduler")


class LoadedRun:
    """What is known of one run."""

    def __init__(self, run_id: str, create: PolicyFactory, log: EventLog) -> None:
        self.run_id = run_id
        self.log = log
        self.learner: Learner | None = None
        self.state = st.RunState()
        self.following = st.Following()
        self.places = st.Places()
        self.opened = st.Opened()
        self.answers: OrderedDict[bytes, st.Answer] = OrderedDict()
        """By encoded key, the oldest first."""
        self.saved: OrderedDict[str, SavedState] = OrderedDict()
        self.closed_lends: dict[str, float | None] = {}
        self._create = create
        self._taught = False

    def take(self, record: st.Record) -> None:
        """Take over what a record says."""
        for message in record.events:
            self._happened(event_from_proto(message))
        if record.HasField("state"):
            if record.state.epoch != self.state.epoch:
                self.answers.clear()
            self.state = record.state
        if record.HasField("following"):
            self.following = record.following
        if record.HasField("places"):
            self.places = record.places
        if record.HasField("opened"):
            self.opened = record.opened
        for answer in record.answers:
            self.answers[answer.key.SerializeToString(deterministic=True)] = answer
        for saved in record.saved:
            self.saved[saved.checkpoint_id] = SavedState(saved.step, self._knowledge(saved.policy_image))

    def _happened(self, placed: events.RunEvent) -> None:
        match placed.event:
            case events.RunOpened():
                config = RunConfig.of_json(placed.event.config_json)
                self._adopt(config)
                assert self.learner is not None
                recall(self.learner, config, self.saved.get(placed.event.checkpoint_id))
            case events.RunUpdated():
                self._adopt(RunConfig.of_json(placed.event.config_json))
            case events.LendDone():
                self.closed_lends[placed.event.lend_id] = placed.event.cost_seconds
            case events.LendAbandoned():
                self.closed_lends[placed.event.lend_id] = None
        self.log.keep(placed)
        self._learn(placed)

    def _adopt(self, config: RunConfig) -> None:
        if self.learner is None:
            self.learner = Learner(config, self._create)
        else:
            self.learner.adopt(config, self.log)

    def _learn(self, placed: events.RunEvent) -> None:
        if self.learner is not None:
            # A measurement that it refused when it happened, it refuses again.
            with contextlib.suppress(FieldError):
                self.learner.observe(placed.event, placed.at)

    # ---------------------------------------------------------------------------------------------------- snapshot

    def begin(self, image: st.RunImage) -> None:
        """Take over the image of the run, but for its events."""
        self.log.restore(image.first_event)
        for lend in image.closed_lends:
            self.closed_lends[lend.lend_id] = lend.cost_seconds if lend.HasField("cost_seconds") else None
        self.take(image.record)
        config = RunConfig.of_json(self.state.config_json)
        self.learner = Learner(config, self._create)
        knowledge = self._knowledge(image.policy_image)
        self._taught = knowledge is not None
        if knowledge is not None:
            self.learner.recall(*knowledge, config)

    def keep(self, placed: events.RunEvent) -> None:
        """Take over an event of the image: the policy's image knows it already, unless that could not be read."""
        self.log.keep(placed)
        if not self._taught:
            self._learn(placed)

    def _knowledge(self, image: bytes) -> tuple[Policy, PolicyFeed] | None:
        try:
            return cast(tuple[Policy, PolicyFeed], policy_image.read(image))
        except policy_image.UnreadableImageError as error:
            _log.warning("what a policy learned was written by another version", run_id=self.run_id, error=str(error))
            return None


class Loading:
    """All runs, while they are read. `history`: events kept per run."""

    def __init__(self, create: PolicyFactory, history: int) -> None:
        self.runs: dict[str, LoadedRun] = {}
        self.now = 0.0
        self._create = create
        self._history = history
        self._begun: LoadedRun | None = None

    def feed(self, part: st.Part) -> None:
        """Take over the next part of a snapshot."""
        match part.WhichOneof("part"):
            case "now":
                self.now = part.now
            case "run":
                self._begun = self._run(part.run.run_id)
                self._begun.begin(part.run)
            case "events":
                assert self._begun is not None
                for message in part.events.events:
                    self._begun.keep(event_from_proto(message))
            case _:
                raise ValueError("a part of the snapshot is of a kind that this version does not know")

    def apply(self, run_id: str, record: st.Record) -> None:
        """Take over a record."""
        self.now = max(self.now, record.now)
        if record.forgotten:
            self.runs.pop(run_id, None)
        else:
            self._run(run_id).take(record)

    def _run(self, run_id: str) -> LoadedRun:
        if run_id not in self.runs:
            self.runs[run_id] = LoadedRun(run_id, self._create, EventLog(self._history, PACKING))
        return self.runs[run_id]


async def load(journal: Journal, create: PolicyFactory, history: int) -> Loading:
    """All that the journal knows. Raises DATA_LOSS / JOURNAL_DAMAGED with `last_good_position`."""
    loading = Loading(create, history)
    position = journal.snapshot_position
    try:
        async for chunk in journal.read_snapshot():
            loading.feed(st.Part.FromString(chunk))
        async for record in journal.replay():
            loading.apply(record.stream, st.Record.FromString(record.payload))
            position = record.position
    except TurnoutError as error:
        if "last_good_position" in error.metadata:
            raise
        raise _unsound(str(error), position) from error
    except (KeyError, ValueError, TypeError, AssertionError, DecodeError) as error:
        raise _unsound(repr(error), position) from error
    return loading


def _unsound(error: str, position: int) -> TurnoutError:
    message = f"record {position + 1} cannot be applied: {error}; the last good position is {position}"
    return data_loss("JOURNAL_DAMAGED", message, last_good_position=position)
