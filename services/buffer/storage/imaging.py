"""RunImaging: a run written down little by little, as it was at one moment, while it goes on.

Invariants: the image is the run as it was when the imaging began: what is small is copied then, and a group that is
about to change before its turn is written down first. Payloads of a group that was written stay readable until
`release`. Little is written between two parts, so whoever takes parts can pause often.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import TypeVar

from services.buffer.domain.claims import Claim
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.leases import Lease, LeaseState
from services.buffer.domain.outputs import Payload
from services.buffer.domain.run import Run
from services.buffer.storage.images import write_evictions, write_group, write_lease, write_partition, write_prompt
from services.buffer.wire.config import config_to
from services.buffer.wire.groups import event_to
from services.buffer.wire.outputs import ref_to, token_to
from services.buffer.wire.scalars import int64
from services.runtime.idempotency import Answer
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

# Groups are written into a part until it has about this size, which takes some hundred microseconds.
PART_BYTES = 64 << 10
# What is counted for a group beside its results, and for a trajectory that is not settled: both take time rather than
# space.
GROUP_BYTES = 512
MEMBER_BYTES = 512
ITEMS_PER_PART = 250

T = TypeVar("T")


class RunImaging:
    """The image of one run. `parts` gives it; `close` ends it, also early.

    For a checkpoint, groups in flight are written as pending, leased ones as they were before, and neither claims,
    leases, uploads, answers nor events are.
    """

    def __init__(self, run: Run, answers: Mapping[str, list[tuple[str, Answer]]] | None = None) -> None:
        """`answers` by call; without them it is a checkpoint."""
        self.run = run
        self._checkpoint = answers is None
        self._answers = answers or {}
        state = run.state
        self._head = self._write_head()
        self._spans = {
            partition.name: [*partition.evictions.spans[:-1], *deepcopy(partition.evictions.spans[-1:])]
            for partition in run.partitions.values()
        }
        self._groups: list[tuple[str, list[Group]]] = [
            (name, list(partition.groups.values())) for name, partition in run.partitions.items()
        ]
        self._last = state.sequence
        self._done: set[int] = set()
        # Written before their turn, by partition.
        self._early: dict[str, st.Part] = {}
        self._pinned: list[Payload] = []
        self.sampled: list[str] = [group_id for lease in state.leases.live.values() for group_id in lease.group_ids]
        self._claims: list[Claim] = []
        self._leases: list[Lease] = []
        self._frozen: dict[str, tuple[LeaseState, float, Iterable[Group]]] = {}
        self._events = state.events.kept() if not self._checkpoint else iter(())
        if not self._checkpoint:
            self._claims = list(state.claims)
            self._leases = state.leases.remembered()
            for lease in [*state.leases.live.values(), *map(state.leases.require, state.leases.retained.names())]:
                kept = lease.groups if lease.state is LeaseState.COMMITTED else ()
                self._frozen[lease.lease_id] = (lease.state, lease.ended_at, kept)
        state.watchers = (*state.watchers, self)

    def _write_head(self) -> st.Part:
        state = self.run.state
        part = st.Part()
        head = part.run
        head.run_id = self.run.run_id
        head.config.CopyFrom(config_to(state.config))
        head.created_at = self.run.created_at
        head.id_prefix = state.ids.prefix
        head.next_id = state.ids.next_number
        head.epoch = state.epoch
        head.step = int64(state.step)
        head.sequence = state.sequence
        head.next_event = state.events.next_sequence
        for partition in self.run.partitions.values():
            write_partition(head.partitions.add(), partition)
        if not self._checkpoint:
            head.uploads.extend([ref_to(payload) for payload in state.payloads.uploads()])
        return part

    def before_change(self, partition: str, group: Group) -> None:
        """Write a group down before it changes, unless it is written or younger than the image."""
        if group.sequence > self._last or group.sequence in self._done:
            return
        part = self._early.get(partition)
        if part is None:
            part = self._early[partition] = st.Part()
            part.groups.partition = partition
        self._write(part.groups, group)

    def _write(self, image: st.GroupsImage, group: Group) -> None:
        self._done.add(group.sequence)
        made = image.groups.add()
        if not self._checkpoint:
            write_group(made, group)
            payloads = group.payloads()
        elif group.live:
            write_prompt(made, group)
            made.state = pb.GROUP_STATE_PENDING
            payloads = [] if group.prompt is None else [group.prompt]
        else:
            write_group(made, group)
            if group.state is GroupState.SAMPLED:
                made.state = pb.GROUP_STATE_FAILED if group.failed else pb.GROUP_STATE_FINISHED
            made.lease_id = ""
            payloads = group.payloads()
        own = [payload for payload in payloads if not payload.store]
        self.run.state.payloads.pin(own)
        self._pinned += own

    def parts(self) -> Iterator[tuple[list[Payload], st.Part]]:
        """The parts in order, each with the payloads that it names; `release` those once they are read."""
        for image in self._head.run.partitions:
            for end, summary in self._spans[image.name]:
                write_evictions(image.eviction_spans.add(), end, summary)
        yield [], self._head
        for partition, groups in self._groups:
            part = self._new_groups(partition)
            size = 0
            for group in groups:
                if group.sequence in self._done:
                    continue
                self._write(part.groups, group)
                size += GROUP_BYTES + len(group.results) + group.small_bytes + MEMBER_BYTES * len(group.members)
                if size >= PART_BYTES:
                    yield self._taken(), part
                    yield from self._take_early()
                    part, size = self._new_groups(partition), 0
            if size:
                yield self._taken(), part
        yield from self._take_early()
        self._stop_watching()
        yield from self._rest()
        part = st.Part(run_end=True)
        yield [], part

    @staticmethod
    def _new_groups(partition: str) -> st.Part:
        part = st.Part()
        part.groups.partition = partition
        return part

    def _take_early(self) -> Iterator[tuple[list[Payload], st.Part]]:
        early, self._early = self._early, {}
        for part in early.values():
            yield self._taken(), part

    def _taken(self) -> list[Payload]:
        taken, self._pinned = self._pinned, []
        return taken

    def _rest(self) -> Iterator[tuple[list[Payload], st.Part]]:
        for claims in _lots(self._claims):
            part = st.Part()
            for claim in claims:
                part.claims.claims.add(
                    token=token_to(claim.token),
                    partition=claim.partition,
                    group_id=claim.group.group_id,
                    worker_id=claim.worker_id,
                )
            yield [], part
        for lease in self._leases:
            part = st.Part()
            state, ended_at, groups = self._frozen.get(lease.lease_id, (lease.state, lease.ended_at, ()))
            write_lease(part.leases.leases.add(), lease, state, ended_at, groups)
            yield [], part
        for call, kept in self._answers.items():
            for answers in _lots(kept):
                yield [], answers_part(self.run.run_id, call, answers)
        for events in _lots(self._events):
            part = st.Part()
            part.events.events.extend([event_to(event) for event in events])
            yield [], part

    def release(self, payloads: Iterable[Payload]) -> None:
        """The payloads of a part were read."""
        self.run.state.payloads.unpin(payloads)

    def _stop_watching(self) -> None:
        state = self.run.state
        state.watchers = tuple(watcher for watcher in state.watchers if watcher is not self)

    def close(self) -> None:
        """Let go of the run."""
        self._stop_watching()
        self.release(self._taken())


def answers_part(run_id: str, call: str, answers: Iterable[tuple[str, Answer]]) -> st.Part:
    """Answers of one call."""
    part = st.Part()
    part.answers.run_id = run_id
    for request_id, answer in answers:
        image = part.answers.answers.add(call=call, request_id=request_id, fingerprint=answer.fingerprint, at=answer.at)
        if call == "ClaimGroups":
            claim_ids = answer.value
            assert isinstance(claim_ids, tuple)
            image.claims.extend(claim_ids)
        else:
            response = answer.value
            assert hasattr(response, "SerializeToString")
            image.response = response.SerializeToString()
    return part


def _lots(items: Iterable[T]) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, ITEMS_PER_PART)):
        yield some
