"""PayloadBook: which bytes are kept, for whom, and how many.

Invariants: bytes of the buffer's own store live as long as something names them or their upload lease lasts; `held` is
the sum of the declared sizes of everything kept, external payloads included; a payload is named only if it exists with
that size and CRC. The bytes themselves are the business of a PayloadStore, or of an external store, whose payloads the
ExternalBook of the run follows; those of small payloads of results are with their group, and only counted here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from google_crc32c import extend

from services.buffer.domain.caps import cap_reached
from services.buffer.domain.deadlines import Deadlines
from services.buffer.domain.external import ExternalBook, Key
from services.buffer.domain.ids import Ids
from services.buffer.domain.outputs import InlinePayload, Outputs, Payload
from services.runtime.errors import TurnoutError, invalid_argument, not_found, require_id

# Larger payloads go through PutPayload: many inline ones travel in one message, whose size is bounded.
MAX_INLINE_BYTES = 256 * 1024


class Upload(Protocol):
    """One payload on its way into a store; nothing of it can be read before `finish`."""

    @property
    def crc32c(self) -> int:
        """CRC32C of what was taken so far."""

    async def write(self, chunk: bytes) -> None:
        """Take the next bytes, waiting while too many are in flight. Raises RESOURCE_EXHAUSTED / DISK_FULL."""

    async def finish(self) -> None:
        """Return once every byte is as durable as the store makes it; from then on the payload can be read."""

    def abort(self) -> None:
        """Forget what came; after `finish` it does nothing."""


class PayloadStore(Protocol):
    """Where the bytes of the buffer's own payloads are."""

    def put(self, payload_id: str, data: bytes, crc32c: int) -> None:
        """Keep `data`, whose CRC32C is given; of an id that is kept already (a replayed record) the bytes stay.

        It can be read at once and is written soon; until then it is the journal's record that makes it durable.
        """

    def delete(self, payload_id: str) -> None:
        """Forget the bytes of an id. They go for good once what was decided so far is durable."""

    def upload(self, payload_id: str) -> Upload:
        """Begin to take a payload in parts, under an id that was never used."""

    @property
    def persistent(self) -> bool:
        """Whether bytes outlive the process."""
        ...

    async def flush(self) -> None:
        """Return once all that was put so far is durable without the records that brought it.

        Raises RESOURCE_EXHAUSTED / DISK_FULL.
        """

    def retain(self, payload_ids: Iterable[str]) -> list[str]:
        """Forget the bytes of every other id: at a start, those whose decision was never durable; returns the lost."""
        ...

    async def room(self) -> None:
        """Wait until there is room for more bytes to `put`. Raises RESOURCE_EXHAUSTED / DISK_FULL."""

    async def read(self, payload_id: str, offset: int, size: int) -> bytes:
        """Some bytes from `offset` on, at least one and at most `size` unless the payload ends there.

        Raises NOT_FOUND / PAYLOAD_NOT_FOUND, DATA_LOSS / PAYLOAD_DAMAGED.
        """

    def at_hand(self, payload_id: str, offset: int, size: int) -> bytes | None:
        """The same without waiting, if that can be; None leaves it to `read`. Raises DATA_LOSS / PAYLOAD_DAMAGED."""


def payload_not_found(payload_id: str) -> TurnoutError:
    """No payload of that id is kept."""
    return not_found("PAYLOAD_NOT_FOUND", "no such payload", field="id", value=payload_id)


class MemoryPayloadStore:
    """A PayloadStore in memory."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._data)

    def put(self, payload_id: str, data: bytes, crc32c: int) -> None:
        """Keep `data`."""
        self._data.setdefault(payload_id, data)

    def delete(self, payload_id: str) -> None:
        """Forget the bytes of an id."""
        self._data.pop(payload_id, None)

    def upload(self, payload_id: str) -> Upload:
        """Begin to take a payload in parts."""
        return _MemoryUpload(self, payload_id)

    @property
    def persistent(self) -> bool:
        """They do not outlive the process."""
        return False

    async def flush(self) -> None:
        """Nothing is made durable."""

    def retain(self, payload_ids: Iterable[str]) -> list[str]:
        """Forget the bytes of every other id."""
        wanted = list(payload_ids)
        self._data = {payload_id: self._data[payload_id] for payload_id in wanted if payload_id in self._data}
        return [payload_id for payload_id in wanted if payload_id not in self._data]

    async def room(self) -> None:
        """There is room as long as there is memory."""

    def at_hand(self, payload_id: str, offset: int, size: int) -> bytes | None:
        """Left to `read`, which does not wait either."""
        return None

    async def read(self, payload_id: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on. Raises NOT_FOUND / PAYLOAD_NOT_FOUND."""
        data = self._data.get(payload_id)
        if data is None:
            raise payload_not_found(payload_id)
        return data if not offset and size >= len(data) else data[offset : offset + size]


class _MemoryUpload:
    def __init__(self, store: MemoryPayloadStore, payload_id: str) -> None:
        self._store = store
        self._payload_id = payload_id
        self._chunks: list[bytes] = []
        self.crc32c = 0

    async def write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.crc32c = extend(self.crc32c, chunk)

    async def finish(self) -> None:
        self._store.put(self._payload_id, b"".join(self._chunks), self.crc32c)

    def abort(self) -> None:
        self._chunks.clear()


@dataclass(slots=True, eq=False)
class _Entry:
    size: int
    crc32c: int
    holders: int


class PayloadBook:
    """The payloads of one run."""

    __slots__ = ("_entries", "_external", "_ids", "_pins", "_store", "_uploads", "external", "held")

    def __init__(self, store: PayloadStore, ids: Ids, external: ExternalBook | None = None) -> None:
        """`external` is that of the run's id, a new one unless given."""
        self._store = store
        self._ids = ids
        self.external = ExternalBook() if external is None else external
        self._entries: dict[str, _Entry] = {}
        self._external: dict[Key, _Entry] = {}
        self._uploads = Deadlines()
        self._pins: dict[str, int] = {}
        self.held = 0

    def check_room(self, size: int, limit: int, field: str) -> None:
        """Raise RESOURCE_EXHAUSTED / CAP_BYTES if `size` more bytes would pass `limit`."""
        if self.held + size > limit:
            raise cap_reached(
                "max_bytes",
                "CAP_BYTES",
                f"{self.held} bytes are held, {size} more would pass the cap of {limit}",
                field=field,
                value=size,
                limit=limit,
                present=self.held,
            )

    def uploaded(self, payload_id: str, size: int, crc32c: int, until: float) -> Payload:
        """Count bytes that the store holds under a new id, until `until` or for as long as something names them."""
        self._entries[payload_id] = _Entry(size, crc32c, 0)
        self.held += size
        self._uploads.set(payload_id, until)
        return Payload(payload_id, size, crc32c)

    def check(self, field: str, payload: Payload | InlinePayload) -> int:
        """Raise unless the payload can be named; returns the bytes that naming it would add."""
        if isinstance(payload, InlinePayload):
            if payload.size > MAX_INLINE_BYTES:
                message = f"an inline payload has at most {MAX_INLINE_BYTES} bytes; larger ones go through PutPayload"
                raise invalid_argument(f"{field}.inline", message, value=payload.size, reason="PAYLOAD_TOO_LARGE")
            return payload.size
        if payload.store:
            require_id(f"{field}.ref.store", payload.store)
            require_id(f"{field}.ref.id", payload.id)
            if payload.size < 0:
                message = "the size of a payload must not be negative"
                raise invalid_argument(f"{field}.ref.size", message, value=payload.size, reason="OUT_OF_RANGE")
            self.external.check(field, payload)
            return 0 if (payload.store, payload.id) in self._external else payload.size
        entry = self._entries.get(payload.id)
        if entry is None:
            raise not_found("PAYLOAD_NOT_FOUND", "no such payload", field=f"{field}.ref.id", value=payload.id)
        if (entry.size, entry.crc32c) != (payload.size, payload.crc32c):
            message = f"the payload has {entry.size} bytes and CRC32C {entry.crc32c:#010x}"
            raise invalid_argument(f"{field}.ref", message, value=payload.id, reason="PAYLOAD_MISMATCH")
        return 0

    def keep(self, payload: Payload | InlinePayload) -> Payload:
        """Name a payload that passed `check`."""
        if isinstance(payload, InlinePayload):
            return self._store_new(payload)
        if payload.store:
            self._name(payload)
        else:
            self._entries[payload.id].holders += 1
            self._uploads.discard(payload.id)
        return payload

    def _name(self, payload: Payload) -> None:
        key = (payload.store, payload.id)
        entry = self._external.get(key)
        if entry is None:
            entry = self._external[key] = _Entry(payload.size, payload.crc32c, 0)
            self.held += payload.size
            self.external.name(payload)
        entry.holders += 1

    def keep_outputs(self, outputs: Outputs) -> None:
        """Name every payload of outputs that passed `check_outputs`, and put what is kept in its place."""
        self.held += outputs.small_bytes
        if outputs.payloads:
            outputs.payloads = tuple([(position, self.keep(payload)) for position, payload in outputs.payloads])

    def refuse(self, outputs: Outputs) -> None:
        """These outputs are not wanted any more: what nothing names of theirs in external stores may go."""
        for _, payload in outputs.payloads:
            if isinstance(payload, Payload) and payload.store and payload.id:
                self.external.refuse(payload)

    def check_outputs(self, field: str, outputs: Outputs) -> None:
        """Raise unless every payload of the outputs can be named."""
        for position, payload in outputs.payloads:
            self.check(f"{field}[{position}].payload", payload)

    def drop(self, payloads: Iterable[Payload], small: int = 0) -> int:
        """Something no longer names these, nor `small` bytes beside it; returns the bytes that are gone for good."""
        before = self.held
        self.held -= small
        for payload in payloads:
            if payload.store:
                self._drop_external((payload.store, payload.id))
                continue
            entry = self._entries[payload.id]
            entry.holders -= 1
            if not entry.holders:
                self._forget(payload.id)
        return before - self.held

    def pin(self, payloads: Iterable[Payload]) -> None:
        """Let the bytes of these stay in the own store until `unpin`, though nothing may name them any more by then.

        Whoever reads them does this; it is no decision, and changes nothing that a decision depends on.
        """
        for payload in payloads:
            if not payload.store:
                self._pins[payload.id] = self._pins.get(payload.id, 0) + 1

    def unpin(self, payloads: Iterable[Payload]) -> None:
        """End a `pin`."""
        for payload in payloads:
            if payload.store:
                continue
            self._pins[payload.id] -= 1
            if not self._pins[payload.id]:
                del self._pins[payload.id]
                if payload.id not in self._entries:
                    self._store.delete(payload.id)

    def next_expiry(self) -> float | None:
        """When the first unnamed upload ends."""
        return self._uploads.next()

    def expired(self, now: float, limit: int) -> list[str]:
        """Up to `limit` uploads that nobody named in time; they are to be forgotten now."""
        return list(islice(self._uploads.pop_due(now), limit))

    def forget_uploads(self, payload_ids: Iterable[str]) -> None:
        """Forget uploads that nobody named."""
        for payload_id in payload_ids:
            self._uploads.discard(payload_id)
            self._forget(payload_id)

    def uploads(self) -> list[Payload]:
        """The uploads that nobody named yet."""
        found = [(payload_id, self._entries[payload_id]) for payload_id in self._uploads.names()]
        return [Payload(payload_id, entry.size, entry.crc32c) for payload_id, entry in found]

    def restart(self, until: float) -> None:
        """Let every upload live until `until`."""
        for payload_id in self._uploads.names():
            self._uploads.set(payload_id, until)

    def adopt_small(self, size: int) -> None:
        """Count bytes that are with a group."""
        self.held += size

    def adopt(self, payload: Payload, *, upload_until: float | None = None) -> None:
        """Name a payload whose bytes the store has already, or, with a time, keep it as an upload."""
        if payload.store:
            self._name(payload)
            return
        entry = self._entries.get(payload.id)
        if entry is None:
            self.held += payload.size
            entry = self._entries[payload.id] = _Entry(payload.size, payload.crc32c, 0)
        if upload_until is None:
            entry.holders += 1
        else:
            self._uploads.set(payload.id, upload_until)

    def ids(self) -> Collection[str]:
        """Ids of everything that is kept in the own store."""
        return self._entries.keys()

    def clear(self, limit: int | None = None) -> bool:
        """Forget everything, or up to `limit` payloads: the run is gone. Returns whether there is more.

        Those of external stores are all let go at once.
        """
        self.let_external_go()
        number = 0
        # From the end, which is found at once however many are gone.
        while self._entries and number != limit:
            payload_id, entry = self._entries.popitem()
            self.held -= entry.size
            self._delete(payload_id)
            number += 1
        if self._entries:
            return True
        self.held = 0
        return False

    def _store_new(self, payload: InlinePayload) -> Payload:
        payload_id = self._ids.make("payload")
        self._store.put(payload_id, payload.data, payload.crc32c)
        self._entries[payload_id] = _Entry(payload.size, payload.crc32c, 1)
        self.held += payload.size
        return Payload(payload_id, payload.size, payload.crc32c, "", payload.content_type, inline=True)

    def let_external_go(self) -> None:
        """Name nothing in external stores any more."""
        external, self._external = self._external, {}
        self.held -= sum([entry.size for entry in external.values()])
        self.external.drop(external)

    def _drop_external(self, key: Key) -> None:
        entry = self._external[key]
        entry.holders -= 1
        if not entry.holders:
            self.held -= self._external.pop(key).size
            self.external.drop((key,))

    def _forget(self, payload_id: str) -> None:
        self.held -= self._entries.pop(payload_id).size
        self._delete(payload_id)

    def _delete(self, payload_id: str) -> None:
        if payload_id not in self._pins:
            self._store.delete(payload_id)
