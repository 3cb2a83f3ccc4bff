"""What is on disk of one run, and what has changed since.

Invariant: a record is made between two turns of the event loop or where a task is about to wait, so it holds states and
events that belong together: whatever a crash leaves is a moment that there was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.message import Message

from services.scheduler.checkpoints import Checkpoints
from services.scheduler.convert_events import event_to_proto
from services.scheduler.domain.calls import CallKey
from services.scheduler.domain.events import RunEvent
from services.scheduler.hosted import HostedRun
from services.scheduler.packing import weight
from services.scheduler.storage import policy_image
from services.scheduler.storage.images import following_of, key_to, places_of, state_of
from turnout.scheduler.storage.v1 import storage_pb2 as st
from turnout.scheduler.v1 import scheduler_pb2

PART_WEIGHT = 500
"""Events, and requests that readings hold, in one part of a snapshot: some milliseconds of the event loop."""


class Book:
    """Keeps account of one run. `events`: sequence number of the last event on disk; `saved`: checkpoints there."""

    def __init__(self, hosted: HostedRun, checkpoints: Checkpoints, events: int = 0, saved: Iterable[str] = ()) -> None:
        self.hosted = hosted
        self._checkpoints = checkpoints
        self._events = events
        self._saved = set(saved)
        self._state = b""
        self._following = b""
        self._places = b""
        self._places_seen: tuple[object, ...] = ()
        self._opened = (b"", b"")

    def record(self) -> st.Record | None:
        """What has become of the run since the last record; None if nothing has."""
        record, hosted = st.Record(), self.hosted
        log = hosted.run.log
        if log.last > self._events:
            record.events.extend(map(event_to_proto, log.read(max(self._events + 1, log.first), log.last)))
            self._events = log.last
        self._states(record)
        opened = (hosted.opening, hosted.answered)
        if opened != self._opened:
            self._opened = opened
            record.opened.request, record.opened.response = opened
        record.answers.extend(_answer(*answer) for answer in hosted.run.order.take_fresh())
        self._take_saved(record)
        return record if record.ByteSize() else None

    def _states(self, record: st.Record) -> None:
        state = state_of(self.hosted)
        encoded = state.SerializeToString(deterministic=True)
        if encoded != self._state:
            self._state = encoded
            record.state.CopyFrom(state)
        following = following_of(self.hosted)
        encoded = following.SerializeToString(deterministic=True)
        if encoded != self._following:
            self._following = encoded
            record.following.CopyFrom(following)
        self._take_places(record)

    def _take_places(self, record: st.Record) -> None:
        # Large where there are many replicas, and looked at for each event that is taken down.
        seen = (self.hosted.run.modes.revision, self.hosted.tools.holdings.revision)
        if seen == self._places_seen:
            return
        self._places_seen = seen
        places = places_of(self.hosted)
        encoded = places.SerializeToString(deterministic=True)
        if encoded != self._places:
            self._places = encoded
            record.places.CopyFrom(places)

    def _take_saved(self, record: st.Record) -> None:
        kept = self._checkpoints.of(self.hosted.run.run_id)
        for checkpoint_id, state in kept.items():
            if checkpoint_id in self._saved:
                continue
            record.saved.add(
                checkpoint_id=checkpoint_id, step=state.step, policy_image=policy_image.write(state.knowledge)
            )
        self._saved = set(kept)

    def parts(self) -> Iterator[st.Part]:
        """The run's parts of a snapshot. It is that of the moment in which the first is asked for."""
        run = self.hosted.run
        kept = iter(run.log)
        image = st.RunImage(
            run_id=run.run_id,
            first_event=run.log.first,
            policy_image=policy_image.write((run.learner.policy, run.learner.feed)),
        )
        for lend_id, cost_s in run.lends.closed().items():
            image.closed_lends.add(lend_id=lend_id, cost_seconds=cost_s)
        image.record.state.CopyFrom(state_of(self.hosted))
        image.record.following.CopyFrom(following_of(self.hosted))
        image.record.places.CopyFrom(places_of(self.hosted))
        image.record.opened.request, image.record.opened.response = self.hosted.opening, self.hosted.answered
        image.record.answers.extend(_answer(*answer) for answer in run.order.answers())
        for checkpoint_id, state in self._checkpoints.of(run.run_id).items():
            image.record.saved.add(
                checkpoint_id=checkpoint_id, step=state.step, policy_image=policy_image.write(state.knowledge)
            )
        yield st.Part(run=image)
        for batch in _batches(kept):
            yield st.Part(events=scheduler_pb2.WatchRunResponse(events=map(event_to_proto, batch)))


def _batches(kept: Iterable[RunEvent]) -> Iterator[list[RunEvent]]:
    batch: list[RunEvent] = []
    weighs = 0
    for placed in kept:
        batch.append(placed)
        weighs += weight(placed)
        if weighs >= PART_WEIGHT:
            yield batch
            batch, weighs = [], 0
    if batch:
        yield batch


def _answer(key: CallKey, content: bytes, answer: object) -> st.Answer:
    assert isinstance(answer, Message)
    return st.Answer(key=key_to(key), content=content, response=answer.SerializeToString())
