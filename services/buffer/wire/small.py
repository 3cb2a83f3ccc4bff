"""Small payloads: those that are kept within the outputs of their group, shown as references all the same.

Invariant: the id of one tells where it is, so no book is kept of them: group by sequence number, trajectory, output.
"""

from collections.abc import Iterable, Sequence

from google_crc32c import value as crc32c

from services.buffer.domain.access import not_opened
from services.buffer.domain.group import Group
from services.buffer.domain.outputs import Payload
from services.runtime.errors import invalid_argument
from turnout.buffer.v1 import buffer_pb2 as pb

_PREFIX = "small-"


def small_id(sequence: int, index: int, position: int) -> str:
    """Id of the payload of output `position` of trajectory `index` of the group of that sequence number."""
    return f"{_PREFIX}{sequence:x}.{index:x}.{position:x}"


def small_payloads(groups: Iterable[Group], refs: Sequence[Payload]) -> dict[str, bytes]:
    """The bytes of those references that are to small payloads, all of which these groups must hold.

    Raises PERMISSION_DENIED / PAYLOAD_NOT_IN_LEASE, INVALID_ARGUMENT / PAYLOAD_MISMATCH.
    """
    wanted = [(position, ref) for position, ref in enumerate(refs) if not ref.store and ref.id.startswith(_PREFIX)]
    if not wanted:
        return {}
    by_sequence = {f"{group.sequence:x}": group for group in groups}
    named = dict.fromkeys(ref.id.removeprefix(_PREFIX).partition(".")[0] for _, ref in wanted)
    held: dict[str, bytes] = {}
    for sequence in named:
        group = by_sequence.get(sequence)
        if group is not None:
            held.update(_held_by(group))
    for number, ref in wanted:
        field = f"refs[{number}]"
        data = held.get(ref.id)
        if data is None:
            raise not_opened(field, ref)
        if (len(data), crc32c(data)) != (ref.size, ref.crc32c):
            message = f"the payload has {len(data)} bytes and CRC32C {crc32c(data):#010x}"
            raise invalid_argument(f"{field}.ref", message, value=ref.id, reason="PAYLOAD_MISMATCH")
    return {ref.id: held[ref.id] for _, ref in wanted}


def _held_by(group: Group) -> Iterable[tuple[str, bytes]]:
    for entry in pb.SampledGroup.FromString(group.results).trajectories:
        for position, output in enumerate(entry.outputs):
            if output.HasField("payload"):
                yield small_id(group.sequence, entry.index, position), output.payload.inline
