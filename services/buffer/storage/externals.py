"""Images of the books of external payloads.

Invariants: a book is copied when the image is made, and written bit by bit; what comes back decides as what was
written. When a payload was named matters to living holds alone, so it is written only for what is older than those.
"""

from collections.abc import Iterator

from services.buffer.domain.external import ExternalBook
from services.buffer.wire.outputs import ref_from, ref_to
from turnout.buffer.storage.v1 import storage_pb2 as st

# Some 50 kB.
_PER_PART = 500


class ExternalsImaging:
    """The image of one book, as it is now."""

    def __init__(self, run_id: str, book: ExternalBook) -> None:
        self._run_id = run_id
        self._head = st.Part()
        head = self._head.externals
        head.run_id, head.holds_made, head.given_up = run_id, book.holds_made, book.given_up
        for checkpoint_id, number in book.holds.items():
            head.holds.add(checkpoint_id=checkpoint_id, number=number)
        self._newest = max(book.holds.values(), default=0)
        self._named = dict(book.named) if book.holds else {}
        self._held = dict(book.held)
        self._released = book.released()

    def parts(self) -> Iterator[st.Part]:
        """The parts in order, each of them small."""
        yield self._head
        part = self._begin()
        for named in self._named.values():
            if named.since < self._newest:
                part.externals.payloads.add(ref=ref_to(named.payload), since=named.since)
                if len(part.externals.payloads) == _PER_PART:
                    yield part
                    part = self._begin()
        for held in self._held.values():
            part.externals.payloads.add(ref=ref_to(held.payload), since=held.since, until=held.until)
            if len(part.externals.payloads) == _PER_PART:
                yield part
                part = self._begin()
        for payload in self._released:
            part.externals.released.append(ref_to(payload))
            if len(part.externals.released) == _PER_PART:
                yield part
                part = self._begin()
        yield part

    def _begin(self) -> st.Part:
        part = st.Part()
        part.externals.run_id = self._run_id
        return part


def read_externals(image: st.ExternalsImage, book: ExternalBook) -> None:
    """Put some of an image back into a book."""
    if image.holds_made:
        book.holds_made = image.holds_made
        book.holds.update((hold.checkpoint_id, hold.number) for hold in image.holds)
    for external in image.payloads:
        payload = ref_from(external.ref)
        if external.HasField("until"):
            book.restore_held(payload, external.since, external.until)
        else:
            book.restore_named(payload, external.since)
    for ref in image.released:
        book.restore_released(ref_from(ref))
    book.given_up += image.given_up
