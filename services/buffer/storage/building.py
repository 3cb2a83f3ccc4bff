"""RunBuilder: the groups of an image on their way back into a run.

Invariants: parts may come in any order of groups, they are entered in their order of arrival; nothing of a run is used
before `finish`.
"""

from collections.abc import Iterable, Iterator

from services.buffer.domain.claims import Claim, ClaimToken
from services.buffer.domain.group import Group
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.run import Run
from services.buffer.domain.trajectory import TrajectoryState
from services.buffer.storage.images import read_group, read_lease, read_partition
from services.buffer.wire.outputs import ref_from
from turnout.buffer.storage.v1 import storage_pb2 as st


class PayloadsArriving:
    """Payload bytes of an image on their way into a store."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self._chunks: dict[str, list[bytes]] = {}
        self._sizes: dict[str, int] = {}

    def feed(self, part: st.PayloadPart) -> None:
        """Take some bytes; once they are complete, the store has them."""
        payload_id = part.ref.id
        self._chunks.setdefault(payload_id, []).append(part.data)
        size = self._sizes[payload_id] = self._sizes.get(payload_id, 0) + len(part.data)
        if size == part.ref.size:
            self._store.put(payload_id, b"".join(self._chunks.pop(payload_id)), part.ref.crc32c)
            del self._sizes[payload_id]


class RunBuilder:
    """Fills an empty run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._groups: dict[str, list[Group]] = {name: [] for name in run.partitions}
        self._claims: list[st.ClaimImage] = []
        self._leases: list[st.LeaseImage] = []

    def head(self, image: st.RunImage, *, now: float) -> None:
        """Take the counters of the run; uploads live their full time from `now`."""
        run = self.run
        state = run.state
        state.epoch, state.step, state.sequence = image.epoch, image.step, image.sequence
        state.events.restart(image.next_event)
        for partition in image.partitions:
            read_partition(partition, run.partitions[partition.name])
        for ref in image.uploads:
            state.payloads.adopt(ref_from(ref), upload_until=now + state.config.lease_times.payload)

    def groups(self, image: st.GroupsImage) -> None:
        """Take some groups."""
        self._groups[image.partition] += map(read_group, image.groups)

    def claims(self, images: Iterable[st.ClaimImage]) -> None:
        """Take some claims."""
        self._claims += images

    def leases(self, images: Iterable[st.LeaseImage]) -> None:
        """Take some leases, in their order."""
        self._leases += images

    def finish(self, now: float) -> Run:
        """The run; what runs out in it does so after its full time from `now` on."""
        for _ in self.steps(now):
            pass
        return self.run

    def steps(self, now: float) -> Iterator[None]:
        """Do what `finish` does in small steps."""
        run = self.run
        for name, groups in self._groups.items():
            partition = run.partitions[name]
            for group in sorted(groups, key=lambda group: group.sequence):
                partition.put_back(group)
                yield
            partition.index.sort_running()
        times = run.state.config.lease_times
        for image in self._claims:
            run.state.claims.open(self._claim(image), now + times.claim)
        leases = [(read_lease(image, run.partitions[image.partition]), image.retained) for image in self._leases]
        run.state.leases.restore(leases, now + times.sample)
        for lease, retained in leases:
            if retained:
                run.state.payloads.adopt_small(lease.small_bytes())
                for payload in lease.payloads():
                    run.state.payloads.adopt(payload)

    def _claim(self, image: st.ClaimImage) -> Claim:
        group = self.run.partitions[image.partition].groups[image.group_id]
        token = ClaimToken(image.token.claim_id, image.token.attempt)
        held = {
            index
            for index, trajectory in enumerate(group.members)
            if trajectory.state is TrajectoryState.RUNNING and trajectory.claim_id == token.claim_id
        }
        return Claim(token, image.partition, group, image.worker_id, held)
