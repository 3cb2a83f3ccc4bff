"""The small nouns: operations, lends, transactions, placement, fence, meetings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.engine.domain.fence import Fence
from services.engine.domain.kept import UpdateKind
from services.engine.domain.lends import CLOSED_KEPT, Lends
from services.engine.domain.operations import (
    NAMED_FAILURES,
    Operation,
    OperationLog,
    OperationState,
    Origin,
    Outcome,
    OutcomeKind,
)
from services.engine.domain.partials import KEPT, Partials
from services.engine.domain.placement import SESSIONS_KEPT, Placement
from services.engine.domain.rendezvous import MAX_BLOB_BYTES, Rendezvous
from services.engine.domain.weights import Update, Updates, require_members, split_waves
from services.runtime.errors import Code, TurnoutError, aborted, deadline_exceeded, failed_precondition


def reason(act: Callable[[], object]) -> str:
    """The reason of a refusal."""
    with pytest.raises(TurnoutError) as caught:
        act()
    return caught.value.reason


def field(act: Callable[[], object]) -> str:
    """The field that a refusal names."""
    with pytest.raises(TurnoutError) as caught:
        act()
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value.metadata["field"]


# ------------------------------------------------------------------------------------------------------- operations


def test_an_operation_succeeds_only_if_no_replica_failed() -> None:
    """One failure among many must not be lost."""
    log = OperationLog("p")
    operation = log.begin("Sleep", ["b", "a"], 100.0)
    assert (operation.state, list(operation.outcomes)) == (OperationState.RUNNING, ["a", "b"])
    operation.settle(Outcome("a", OutcomeKind.SKIPPED))
    operation.settle(Outcome.failed("b", aborted("X", "broken"), 0.1))
    operation.settle(Outcome("b", OutcomeKind.DONE))
    operation.end(0.2)
    assert operation.state is OperationState.PARTIAL
    error = operation.error()
    assert error is not None
    assert error.metadata == {"operation_id": operation.operation_id, "failed": "1", "failure.0": "b: X"}
    done = log.begin("Sleep", ["a"], 100.0)
    done.settle(Outcome("a", OutcomeKind.DONE))
    done.end(0.1)
    assert (done.state, done.error()) == (OperationState.SUCCEEDED, None)


def test_the_gravest_failure_gives_the_status() -> None:
    """What may still be under way matters more than what was refused."""
    operation = OperationLog("p").begin("Sleep", ["a", "b"], 0.0)
    operation.settle(Outcome.failed("a", failed_precondition("X", "no"), 0.0))
    operation.settle(Outcome.failed("b", deadline_exceeded("Y", "late"), 0.0))
    error = operation.error()
    assert error is not None
    assert error.code is Code.DEADLINE_EXCEEDED
    other = OperationLog("p").begin("Sleep", ["a"], 0.0)
    other.settle(Outcome.failed("a", TurnoutError(Code.INTERNAL, "Z", "bug"), 0.0))
    assert (other.error() or error).code is Code.FAILED_PRECONDITION


def test_an_error_names_sixteen_failures_at_most() -> None:
    """Trailers have a limit; GetOperation has the rest."""
    operation = OperationLog("p").begin("Sleep", [f"r{i:02}" for i in range(40)], 0.0)
    for replica_id in operation.outcomes:
        operation.settle(Outcome.failed(replica_id, aborted("X", "no"), 0.0))
    error = operation.error()
    assert error is not None
    assert sum(key.startswith("failure.") for key in error.metadata) == NAMED_FAILURES
    assert error.metadata["failed"] == "40"


def test_the_log_forgets_ended_operations_first() -> None:
    """A running operation that was forgotten could never be read."""
    log = OperationLog("p", kept=2)
    running = log.begin("Sleep", ["a"], 0.0)
    for _ in range(5):
        log.begin("Pause", [], 0.0).end(0.0)
    assert log.get(running.operation_id) is running
    page, token = log.page(10, "")
    assert ([operation.kind for operation in page], token) == (["Pause", "Sleep"], "")
    crowded = OperationLog("p", kept=1)
    crowded.begin("A", [], 0.0)
    crowded.begin("B", [], 0.0)
    assert len(crowded.page(10, "")[0]) == 2


def test_pages_go_from_the_newest() -> None:
    """Paging must neither repeat nor skip."""
    log = OperationLog("p")
    for _ in range(5):
        log.begin("Sleep", [], 0.0)
    first, token = log.page(2, "")
    second, token = log.page(2, token)
    third, token = log.page(2, token)
    assert [o.operation_id for o in (*first, *second, *third)] == [f"p-{i}" for i in (5, 4, 3, 2, 1)]
    assert token == ""


@pytest.mark.parametrize("operation_id", ["p-9", "q-1", "1", "", "p-x", "p--1"])
def test_an_unknown_operation(operation_id: str) -> None:
    """Ids of an earlier incarnation must not find an operation of this one."""
    log = OperationLog("p")
    log.begin("Sleep", [], 0.0)
    assert reason(lambda: log.get(operation_id)) == "OPERATION_NOT_FOUND"


@pytest.mark.parametrize(
    ("size", "token", "name"), [(0, "", "page_size"), (1001, "", "page_size"), (1, "x", "page_token")]
)
def test_a_wrong_page_is_named(size: int, token: str, name: str) -> None:
    """A page of nothing would never end."""
    assert field(lambda: OperationLog("p").page(size, token)) == name


def test_a_repeat_goes_on_with_what_is_left() -> None:
    """Acting twice on what is done costs a reset, a pause, or a run."""
    operation = OperationLog("p").begin("Sleep", ["a", "b"], 0.0)
    operation.settle(Outcome("a", OutcomeKind.DONE))
    operation.settle(Outcome.failed("b", aborted("X", "no"), 0.0))
    operation.end(0.1)
    assert operation.reopen() == ["b"]
    assert operation.duration is None
    operation.settle(Outcome("b", OutcomeKind.DONE))
    operation.end(0.1)
    assert operation.state is OperationState.SUCCEEDED


def test_partial_operations_are_kept_until_they_are_made_good() -> None:
    """By call and request_id; other content is another request."""
    partials = Partials()

    def failed(call: str, request_id: str) -> Operation:
        operation = OperationLog("p").begin(call, ["a"], 0.0)
        operation.origin = Origin(call, request_id, b"content")
        operation.settle(Outcome.failed("a", aborted("X", "no"), 0.0))
        partials.keep(operation)
        return operation

    operation = failed("Sleep", "q")
    failed("Sleep", "")
    assert partials.find(Origin("Sleep", "q", b"content")) is operation
    assert partials.find(Origin("Pause", "q", b"content")) is None
    assert partials.find(Origin("Sleep", "", b"content")) is None
    assert reason(lambda: partials.find(Origin("Sleep", "q", b"other"))) == "REQUEST_ID_REUSED"
    newer = [failed("Sleep", f"q{number}") for number in range(KEPT)]
    assert partials.find(Origin("Sleep", "q", b"content")) is None
    newer[0].reopen()
    partials.keep(newer[0])
    assert partials.find(Origin("Sleep", "q0", b"content")) is None


# ------------------------------------------------------------------------------------------------------------ lends


def test_one_lend_at_a_time_and_never_twice() -> None:
    """A BeginLend that comes late must not take the trainer's GPUs."""
    lends = Lends()
    assert lends.begin("l", ["b", "a"]) == ("a", "b")
    assert lends.begin("l", ["c"]) == ("a", "b")
    assert reason(lambda: lends.begin("m", ["a"])) == "LEND_OPEN"
    assert lends.require_open("l") == ("a", "b")
    assert lends.abort("l") == ("a", "b")
    # Again: a repeat frees what the first could not.
    assert lends.abort("l") == ("a", "b")
    assert reason(lambda: lends.begin("l", ["a"])) == "LEND_CLOSED"
    assert reason(lambda: lends.require_open("l")) == "LEND_CLOSED"
    assert reason(lambda: lends.require_open("x")) == "LEND_UNKNOWN"
    assert reason(lambda: lends.begin("m", [])) == "NO_REPLICA"


def test_an_abort_of_a_lend_that_is_not_open() -> None:
    """One that never began is closed, lest it arrive late; one that was reclaimed is told so."""
    lends = Lends()
    assert lends.abort("m") == lends.abort("m") == ()
    assert reason(lambda: lends.begin("m", ["a"])) == "LEND_CLOSED"
    lends.begin("l", ["a"])
    lends.reclaim(["a"])
    lends.reclaimed(["a"])
    assert reason(lambda: lends.abort("l")) == "LEND_CLOSED"


def test_a_replica_that_registers_joins_the_open_lend() -> None:
    """It would stay out of the whole lend otherwise."""
    lends = Lends()
    assert lends.join("b") == ""
    lends.begin("l", ["c"])
    assert lends.join("b") == "l"
    assert lends.require_open("l") == ("b", "c")


def test_a_reclaim_closes_the_lend_with_its_last_member() -> None:
    """Half a lend goes on; none of it does not."""
    lends = Lends()
    lends.begin("l", ["a", "b"])
    lends.reclaim(["a"])
    assert lends.require_open("l") == ("b",)
    lends.reclaim(["a", "b"])
    assert reason(lambda: lends.require_open("l")) == "LEND_CLOSED"
    assert reason(lambda: lends.begin("m", ["a"])) == "RECLAIM_UNDER_WAY"
    lends.reclaimed(["a"])
    assert reason(lambda: lends.begin("m", ["a"])) == "RECLAIM_UNDER_WAY"
    lends.reclaimed(["a", "b"])
    assert lends.begin("m", ["a"]) == ("a",)


def test_closed_lends_are_forgotten_in_the_end() -> None:
    """A run of months must not fill memory with ids."""
    lends = Lends()
    for number in range(CLOSED_KEPT + 1):
        lends.begin(f"l{number}", ["a"])
        lends.abort(f"l{number}")
    assert lends.begin("l0", ["a"]) == ("a",)


# ---------------------------------------------------------------------------------------------------- transactions


def test_waves() -> None:
    """Two waves keep some replicas decoding; one replica alone cannot."""
    assert split_waves(["c", "a", "b"], staggered=True) == [("a", "b"), ("c",)]
    assert split_waves(["c", "a", "b"], staggered=False) == [("a", "b", "c")]
    assert split_waves(["a"], staggered=True) == [("a",)]


def test_a_transaction_goes_wave_by_wave() -> None:
    """The second wave must not open while the first still receives."""
    update = Update("u", UpdateKind.AWAKE, 1, later=split_waves(["a", "b", "c"], staggered=True))
    updates = Updates()
    updates.add(update)
    assert reason(lambda: update.require_wave(0)) == "WAVE_NOT_OPEN"
    assert (update.next_wave(), update.remaining) == (("a", "b"), ["c"])
    update.require_wave(0)
    assert reason(lambda: update.require_wave(1)) == "WAVE_NOT_OPEN"
    assert update.next_wave() == ()
    require_members(update, ["a"], "acks")
    assert reason(lambda: require_members(update, ["c"], "acks")) == "NOT_IN_WAVE"
    update.drop("a")
    require_members(update, ["a"], "acks")
    update.leave_out("b")
    assert reason(lambda: require_members(update, ["b"], "acks")) == "NOT_IN_WAVE"
    assert not update.complete
    assert update.next_wave() == ("c",)
    update.drop("c")
    assert update.complete
    assert updates.find("u").members == {"a", "b", "c"}


def test_closed_transactions_are_remembered_for_a_while() -> None:
    """GPUs are reported vacated after the commit, too."""
    updates = Updates()
    for number in range(130):
        update = Update(f"u{number}", UpdateKind.ASLEEP, number)
        updates.add(update)
        update.closed = number != 129
    assert reason(lambda: updates.find("u0")) == "UPDATE_UNKNOWN"
    assert reason(lambda: updates.require_open("u128")) == "UPDATE_CLOSED"
    assert [update.update_id for update in updates.open] == ["u129"]
    assert updates.require_open("u129").version == 129


# -------------------------------------------------------------------------------------------------------- placement


def test_the_least_loaded_replica_gets_the_request() -> None:
    """Among equals the order is stable."""
    placement = Placement()
    for replica_id in ("b", "a"):
        placement.add(replica_id)
    placed = [placement.place(["unknown", "a", "b"]) for _ in range(3)]
    assert [ticket.replica_id for ticket in placed if ticket] == ["a", "b", "a"]
    assert placement.place([]) is None
    assert placement.place(["unknown"]) is None


def test_a_session_sticks_while_its_replica_can_be_used() -> None:
    """A prefix cache is worth a little imbalance, never a wait for a replica that is gone."""
    placement = Placement()
    for replica_id in ("a", "b"):
        placement.add(replica_id)
    first = placement.place(["b"], "s")
    assert first is not None
    again = placement.place(["a", "b"], "s")
    assert again is not None
    assert (first.replica_id, again.replica_id) == ("b", "b")
    moved = placement.place(["a"], "s")
    assert moved is not None
    assert placement.session_of("s") == "a"
    placement.clear_sessions(["b"])
    assert placement.session_of("s") == "a"
    placement.clear_sessions()
    assert placement.session_of("s") is None


def test_sessions_are_bounded() -> None:
    """Every trajectory may be a session of its own."""
    placement = Placement()
    placement.add("a")
    for number in range(SESSIONS_KEPT + 1):
        ticket = placement.place(["a"], f"s{number}")
        assert ticket is not None
        placement.release(ticket)
    assert (placement.session_of("s0"), placement.session_of("s1")) == (None, "a")


def test_h40_late_completions_never_make_a_load_negative() -> None:
    """A completion after removal re-created the entry with load -1; one that was lost starved the address for ever."""
    placement = Placement()
    placement.add("a")
    late = [placement.place(["a"]), placement.place(["a"])]
    lost = placement.place(["a"])
    placement.remove("a")
    for ticket in late:
        assert ticket is not None
        placement.release(ticket)
    assert placement.load("a") == 0
    placement.add("a")
    assert lost is not None
    placement.release(lost)
    new = placement.place(["a"])
    assert new is not None
    placement.release(lost)
    assert placement.load("a") == 1
    placement.release(new)
    placement.release(new)
    assert placement.load("a") == 0


# ------------------------------------------------------------------------------------------------------------ fence


def test_the_epoch_only_rises() -> None:
    """A trainer that was replaced must not command any more."""
    fence = Fence()
    fence.bind("r")
    fence.check("r", None)
    assert reason(lambda: fence.check("r", 1)) == "UNKNOWN_EPOCH"
    assert fence.open_epoch("r", None) == 1
    assert fence.open_epoch("r", 7) == 7
    assert reason(lambda: fence.open_epoch("r", 7)) == "STALE_EPOCH"
    assert reason(lambda: fence.check("r", 6)) == "STALE_EPOCH"
    assert reason(lambda: fence.check("r", 8)) == "UNKNOWN_EPOCH"
    assert reason(lambda: fence.check("r", None)) == "EPOCH_REQUIRED"
    fence.check("r", 7)
    assert field(lambda: fence.open_epoch("r", -1)) == "epoch"
    assert field(lambda: fence.open_epoch("r", 2**62 + 1)) == "epoch"


def test_one_run_per_controller() -> None:
    """Two runs would move each other's GPUs."""
    fence = Fence()
    assert reason(lambda: fence.require_run("r")) == "RUN_NOT_FOUND"
    fence.open_epoch("r", None)
    assert reason(lambda: fence.open_epoch("s", None)) == "RUN_BOUND"
    assert reason(lambda: fence.bind("s")) == "RUN_BOUND"
    assert reason(lambda: fence.require_run("s")) == "RUN_NOT_FOUND"
    assert reason(lambda: fence.require_run("")) == "BAD_ID"
    assert reason(lambda: Fence("named").bind("s")) == "RUN_BOUND"


def test_an_agent_is_bound_by_whoever_calls_first() -> None:
    """Its replicas are there before any run is."""
    fence = Fence(binds_at_any_call=True)
    fence.require_run("r")
    assert reason(lambda: fence.require_run("s")) == "RUN_NOT_FOUND"


# --------------------------------------------------------------------------------------------------------- meetings


def test_a_meeting_waits_for_all_and_answers_repeats() -> None:
    """Ranks that miss each other hang a collective for half an hour."""
    rendezvous = Rendezvous()
    meeting = rendezvous.join("u", "nccl", "a", ["a", "b"], b"1")
    assert (meeting.full, meeting.missing) == (False, ["b"])
    assert rendezvous.join("u", "nccl", "b", ["b", "a"], b"2").full
    assert rendezvous.join("u", "nccl", "a", ["a", "b"], b"1").blobs == {"a": b"1", "b": b"2"}
    assert not rendezvous.join("u", "other", "a", ["a", "b"], b"1").full
    rendezvous.forget("u")
    assert not rendezvous.join("u", "nccl", "a", ["a", "b"], b"1").full


def test_the_bytes_of_a_meeting_fit_into_one_answer() -> None:
    """gRPC clients take 4 MiB by default."""
    rendezvous = Rendezvous()
    ranks = [f"r{number}" for number in range(4)]
    for rank in ranks[:3]:
        rendezvous.join("u", "m", rank, ranks, bytes(MAX_BLOB_BYTES))
    assert field(lambda: rendezvous.join("u", "m", "r3", ranks, b"1")) == "blob"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"name": ""}, "BAD_ID"),
        ({"participant": ""}, "BAD_ID"),
        ({"participants": ["a", ""]}, "BAD_ID"),
        ({"participant": "c"}, "INVALID_ARGUMENT"),
        ({"participants": ["a", "b", "c"]}, "PARTICIPANTS_DIFFER"),
        ({"blob": b"other"}, "BLOB_CHANGED"),
        ({"blob": bytes(MAX_BLOB_BYTES + 1)}, "INVALID_ARGUMENT"),
    ],
)
def test_whoever_does_not_fit_a_meeting_is_told(fields: dict[str, Any], wrong: str) -> None:
    """A meeting with two lists of participants never ends."""
    rendezvous = Rendezvous()
    known: dict[str, Any] = {"name": "m", "participant": "a", "participants": ["a", "b"], "blob": b"1"}
    rendezvous.join("u", **known)
    assert reason(lambda: rendezvous.join("u", **(known | fields))) == wrong
