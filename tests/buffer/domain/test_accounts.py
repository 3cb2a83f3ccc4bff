"""Evictions with cursors, refill credits, events, and payloads."""

from __future__ import annotations

import gc

import pytest

from services.buffer.domain import evictions as evictions_module
from services.buffer.domain import refill as refill_module
from services.buffer.domain.events import EventRing, GroupEvent, GroupEventKind
from services.buffer.domain.evictions import EvictionLog, EvictionReason
from services.buffer.domain.ids import Ids
from services.buffer.domain.outputs import InlinePayload, Payload
from services.buffer.domain.payloads import MAX_INLINE_BYTES, MemoryPayloadStore, PayloadBook
from services.buffer.domain.refill import SPACING_S, RefillBook
from services.runtime.errors import Code, TurnoutError
from services.runtime.history import BLOCK_WEIGHT, FRESH_WEIGHT

STALE, FLAT, FAILED = EvictionReason.STALE, EvictionReason.ZERO_VARIANCE, EvictionReason.FAILED


def test_slicing_a_wait_loses_and_doubles_nothing() -> None:
    """A wait that is re-armed with the cursor of the one before must see each eviction exactly once."""
    log = EvictionLog()
    for span in (4, 6):
        log.record([STALE], span)
    first = log.cursor()
    log.record([STALE, FLAT], 3)
    log.record([FAILED], 9)
    second = log.cursor()
    assert log.since(0).metrics() == {
        "training/off_policy/evicted_samples": 3,
        "training/off_policy/evicted_samples_staleness/mean": 13 / 3,
        "training/off_policy/evicted_samples_staleness/max": 6,
        "training/off_policy/evicted_samples_staleness/min": 3,
        "training/filter_groups/evicted_samples": 1,
        "training/rollout_failure/evicted_samples": 1,
    }
    between = log.since(first)
    assert (between.evicted, between.by_reason[STALE], between.span_max, between.span_min) == (2, 1, 3, 3)
    assert log.since(second).evicted == 0
    assert log.since(second).metrics() == {}
    assert (log.since(first).dominant(), log.since(second).dominant()) == (STALE, None)


def test_a_cursor_of_another_life_is_refused() -> None:
    log = EvictionLog()
    log.record([FAILED], 1)
    for cursor, reason in ((-1, "OUT_OF_RANGE"), (2, "CURSOR_AHEAD")):
        with pytest.raises(TurnoutError) as caught:
            log.since(cursor)
        assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, reason)


def test_the_log_grows_with_the_waits_and_not_with_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions_module, "_MAX_SUMMARIES", 3)
    log = EvictionLog()
    for _ in range(5):
        for _ in range(100):
            log.record([FAILED], 1)
        log.cursor()
    assert len(log.spans) == 3
    assert log.since(400).evicted == 100
    assert log.total.evicted == 500


def test_a_claim_keeps_its_id_and_is_paid_in_parts_and_once() -> None:
    book, ids = RefillBook(), Ids("t")
    book.add(3)
    [claim] = book.show(1, ids, 0.0)
    assert (claim.unpaid, book.unpaid, book.free) == (3, 3, 0)
    assert book.show(2, ids, 0.0) == [], "a claim is shown to one wait at a time"
    assert book.pay(claim.claim_id, 1) == 2
    book.forget_wait(1)
    book.add(1)
    shown = book.show(2, ids, 0.0)
    assert [(entry.claim_id, entry.unpaid) for entry in shown] == [(claim.claim_id, 2), (shown[1].claim_id, 1)]
    with pytest.raises(TurnoutError) as caught:
        book.pay(claim.claim_id, 3)
    assert (caught.value.reason, book.paid) == ("REFILL_OVERPAID", 1)
    assert book.pay(claim.claim_id, 2) == 0
    with pytest.raises(TurnoutError) as caught:
        book.pay(claim.claim_id, 1)
    assert caught.value.reason == "REFILL_CLAIM_NOT_FOUND"
    assert (book.created, book.paid, book.cancelled, book.unpaid) == (4, 3, 0, 1)


def test_new_credits_are_gathered_for_a_wait_that_was_just_shown_some() -> None:
    """Where everything is evicted on arrival, a claim per eviction makes trainer and buffer go round in circles."""
    book, ids = RefillBook(), Ids("t")
    book.add(1)
    assert [claim.unpaid for claim in book.show(1, ids, 5.0)] == [1]
    for _ in range(7):
        book.add(1)
        assert book.show(1, ids, 5.05) == []
    assert book.new_claim_at(1) == 5.0 + SPACING_S
    assert [claim.unpaid for claim in book.show(1, ids, 5.0 + SPACING_S)] == [7]
    # Another wait is another trainer's turn: it has waited long enough.
    book.add(2)
    assert [claim.unpaid for claim in book.show(2, ids, 5.0 + SPACING_S)] == [2]


def test_declining_twice_is_fine_and_unknown_claims_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refill_module, "_REMEMBER", 1)
    book, ids = RefillBook(), Ids("t")
    book.add(2)
    [first] = book.show(1, ids, 0.0)
    assert [book.decline(first.claim_id), book.decline(first.claim_id)] == [2, 0]
    book.add(1)
    [second] = book.show(1, ids, 1.0)
    book.forget_wait(1)
    assert book.decline(second.claim_id) == 1
    assert book.show(2, ids, 0.0) == []
    assert (book.cancelled, book.unpaid) == (3, 0)
    for unknown in ("refill-t-99", first.claim_id):
        with pytest.raises(TurnoutError) as caught:
            book.decline(unknown)
        assert caught.value.code is Code.NOT_FOUND


def test_events_are_kept_as_far_as_memory_allows() -> None:
    ring = EventRing(capacity=4)
    assert ring.read(1, 10) == []
    for number in range(1, 7):
        ring.append(GroupEventKind.ADDED, "train", f"g{number}", 0, 0.0)
    assert [event.sequence for event in ring.read(3, 10)] == [3, 4, 5, 6]
    assert [event.group_id for event in ring.read(4, 2)] == ["g4", "g5"]
    assert ring.read(7, 10) == []
    with pytest.raises(TurnoutError) as caught:
        ring.read(2, 10)
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "EVENTS_TRIMMED")
    assert caught.value.metadata["first_kept"] == "3"


def test_old_events_are_packed_and_come_out_as_they_went_in() -> None:
    """As objects the events of four busy runs take a hundred megabytes, and grow for a quarter of an hour."""
    before = _objects(GroupEvent)
    ring = EventRing()
    for number in range(1, 5001):
        ring.append(
            GroupEventKind.EVICTED,
            "tr\u00e4in\0",
            f"g/{number}\u2028",
            number // 7,
            1.7e9 + number / 3,
            trajectories=number % 3,
            index=None if number % 2 else number,
            lengths=tuple(range(number % 4)),
            replica_id="standalone-0" * (number % 2),
            reasons=(EvictionReason.STALE, EvictionReason.FAILED)[: number % 3],
            attempt=number % 5,
        )
    told = ring.read(1, 5000)
    assert [event.sequence for event in told] == list(range(1, 5001))
    assert told == list(ring.kept())
    event = told[8]
    assert event == GroupEvent(
        *(9, 1.7e9 + 3, GroupEventKind.EVICTED, "tr\u00e4in\0", "g/9\u2028", 1, 0, None, (0,), "standalone-0"),
        attempt=4,
    )
    assert told[9].reasons == (EvictionReason.STALE,)
    assert told[10].reasons == (EvictionReason.STALE, EvictionReason.FAILED)

    copy = EventRing()
    copy.restart(5001)
    copy.restore(told[:3000])
    copy.restore(told[3000:])
    assert (copy.first_kept, copy.next_sequence) == (1, 5001)
    assert list(copy.kept()) == told

    del told, event
    # Of both rings.
    assert _objects(GroupEvent) - before < 2 * (FRESH_WEIGHT + 2 * BLOCK_WEIGHT)


def _objects(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def book() -> tuple[PayloadBook, MemoryPayloadStore]:
    store = MemoryPayloadStore()
    return PayloadBook(store, Ids("t")), store


def upload(payloads: PayloadBook, store: MemoryPayloadStore, payload_id: str, data: bytes, until: float) -> Payload:
    store.put(payload_id, data, 7)
    return payloads.uploaded(payload_id, len(data), 7, until)


async def test_bytes_live_as_long_as_something_names_them() -> None:
    payloads, store = book()
    kept = payloads.keep(InlinePayload(b"abc", 1))
    uploaded = upload(payloads, store, "upload-1", b"defgh", until=10.0)
    assert (payloads.held, len(store)) == (8, 2)
    assert payloads.keep(uploaded) == uploaded
    payloads.forget_uploads(payloads.expired(20.0, 100))
    assert await store.read(uploaded.id, 1, 3) == b"efg"
    payloads.keep(uploaded)
    assert payloads.drop([uploaded]) == 0
    assert payloads.drop([uploaded, kept]) == 8
    assert (payloads.held, len(store)) == (0, 0)
    assert kept.id not in payloads.ids()


def test_an_upload_that_nobody_names_goes() -> None:
    payloads, store = book()
    upload(payloads, store, "upload-1", b"x", until=5.0)
    assert payloads.next_expiry() == 5.0
    payloads.forget_uploads(payloads.expired(4.9, 100))
    assert len(store) == 1
    payloads.forget_uploads(payloads.expired(5.0, 100))
    assert (len(store), payloads.held, payloads.next_expiry()) == (0, 0, None)


def test_external_payloads_count_by_declared_size() -> None:
    payloads, store = book()
    external = Payload("key/1", 1000, 0, store="ray")
    assert payloads.check("p", external) == 1000
    payloads.keep(external)
    assert (payloads.held, len(store)) == (1000, 0)
    assert payloads.drop([external]) == 1000
    payloads.keep(external)
    payloads.clear()
    assert payloads.held == 0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (InlinePayload(b"x" * (MAX_INLINE_BYTES + 1), 0), "PAYLOAD_TOO_LARGE"),
        (Payload("nope", 1, 1), "PAYLOAD_NOT_FOUND"),
        (Payload("", 1, 1), "PAYLOAD_NOT_FOUND"),
        (Payload("upload-1", 4, 7), "PAYLOAD_MISMATCH"),
        (Payload("upload-1", 3, 8), "PAYLOAD_MISMATCH"),
        (Payload("", 1, 1, store="ray"), "BAD_ID"),
        (Payload("k", -1, 1, store="ray"), "OUT_OF_RANGE"),
    ],
)
def test_a_payload_that_cannot_be_named_is_refused(payload: Payload | InlinePayload, reason: str) -> None:
    payloads, store = book()
    upload(payloads, store, "upload-1", b"abc", until=1.0)
    assert payloads.check("p", Payload("upload-1", 3, 7)) == 0
    assert payloads.check("p", InlinePayload(b"x" * MAX_INLINE_BYTES, 0)) == MAX_INLINE_BYTES
    with pytest.raises(TurnoutError) as caught:
        payloads.check("p", payload)
    assert caught.value.reason == reason


def test_room_is_checked_against_what_is_held() -> None:
    payloads, _ = book()
    payloads.keep(InlinePayload(b"12345", 0))
    payloads.check_room(5, 10, "groups")
    with pytest.raises(TurnoutError) as caught:
        payloads.check_room(6, 10, "groups")
    assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "CAP_BYTES")
