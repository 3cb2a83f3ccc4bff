"""Small payloads: those that stay with their group, shown as references all the same.

Invariant: the id of one tells where it is, so no book is kept of them: trajectory, output, and the group's id. A lease,
which it takes to read one, holds no two groups of one id.
"""

from collections.abc import Iterable, Sequence

from google_crc32c import value as crc32c

from services.buffer.domain.access import not_opened
from services.buffer.domain.group import Group
from services.buffer.domain.outputs import Payload
from services.runtime.errors import invalid_argument
from turnout.buffer.storage.v1 import storage_pb2 as st

_PREFIX = "small-"


def small_id(group_id: str, index: int, position: int) -> str:
    """Id of the payload of output `position` of trajectory `index` of a group."""
    return f"{_PREFIX}{index:x}.{position:x}-{group_id}"


def small_payloads(groups: Iterable[Group], refs: Sequence[Payload]) -> dict[str, bytes]:
    """The bytes of those references that are to small payloads, all of which these groups must hold.

    Raises PERMISSION_DENIED / PAYLOAD_NOT_IN_LEASE, INVALID_ARGUMENT / PAYLOAD_MISMATCH.
    """
    wanted = [(position, ref) for position, ref in enumerate(refs) if not ref.store and ref.id.startswith(_PREFIX)]
    if not wanted:
        return {}
    by_id = {group.group_id: group for group in groups}
    held: dict[str, bytes] = {}
    for group_id in dict.fromkeys(ref.id.removeprefix(_PREFIX).partition("-")[2] for _, ref in wanted):
        group = by_id.get(group_id)
        if group is not None:
            for payload in st.SmallPayloads.FromString(group.small).payloads:
                held[small_id(group_id, payload.index, payload.position)] = payload.data
    for position, ref in wanted:
        field = f"refs[{position}]"
        data = held.get(ref.id)
        if data is None:
            raise not_opened(field, ref)
        if (len(data), crc32c(data)) != (ref.size, ref.crc32c):
            message = f"the payload has {len(data)} bytes and CRC32C {crc32c(data):#010x}"
            raise invalid_argument(f"{field}.ref", message, value=ref.id, reason="PAYLOAD_MISMATCH")
    return {ref.id: held[ref.id] for _, ref in wanted}
