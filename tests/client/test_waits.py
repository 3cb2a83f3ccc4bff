"""Waits and watches that outlive cuts, and refills paid from inside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.client.fakes import events, fail, failing, fake, in_turn, until_cancelled
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AsyncBufferClient,
    BufferClient,
    ClientOptions,
    DeadlineExceeded,
    NotFound,
    RetryPolicy,
    SchedulerClient,
    Timeouts,
    Unavailable,
    duration,
    seconds,
)
from turnout.scheduler.v1 import events_pb2, scheduler_pb2

QUICK = ClientOptions(timeouts=Timeouts(grace=0.5, call=0.5), retry=RetryPolicy(initial=0.01, maximum=0.02))
DRAINING = failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")


def wait_event(**event: Any) -> buffer_pb2.WaitForSampleableResponse:
    return buffer_pb2.WaitForSampleableResponse(**event)


def progress(sampleable: int) -> buffer_pb2.WaitForSampleableResponse:
    return wait_event(progress=buffer_pb2.WaitProgress(depth=buffer_pb2.Depth(sampleable=sampleable), target=8))


def done(outcome: buffer_pb2.WaitOutcome.ValueType, **fields: Any) -> buffer_pb2.WaitForSampleableResponse:
    return wait_event(done=buffer_pb2.WaitDone(outcome=outcome, **fields))


REACHED = done(buffer_pb2.WAIT_OUTCOME_REACHED, next_cursor=7)
TIMED_OUT = done(buffer_pb2.WAIT_OUTCOME_TIMED_OUT)


def wait_request(**fields: Any) -> buffer_pb2.WaitForSampleableRequest:
    return buffer_pb2.WaitForSampleableRequest(
        run_id="r1", partition="train", epoch=3, step=5, target=8, cursor=4, **fields
    )


def sample_request(**fields: Any) -> buffer_pb2.SampleRequest:
    return buffer_pb2.SampleRequest(run_id="r1", partition="train", epoch=3, step=5, batch=2, **fields)


def torn_after(*messages: Any) -> Any:
    """A handler that sends some events and is then cut as by a stopping service."""

    def handle(request: Any, context: Any) -> Iterator[Any]:
        yield from messages
        fail(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")

    return handle


# ------------------------------------------------------------------------------------------------------------ re-arming


def test_a_torn_wait_is_armed_again_with_what_is_left() -> None:
    """A restart in the middle must neither end the wait nor restart its clock, nor move the cursor of the caller."""
    seen: list[int] = []
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = in_turn(torn_after(progress(1)), DRAINING, events(progress(6), REACHED))
        answer = client.wait_for_sampleable(
            wait_request(max_wait=duration(60)), on_progress=lambda event: seen.append(event.depth.sampleable)
        )
        assert answer.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert answer.next_cursor == 7
        assert seen == [1, 6]
        asked = service.requests("WaitForSampleable")
        assert len(asked) == 3
        waits = [seconds(one.max_wait) for one in asked]
        assert waits == sorted(waits, reverse=True)
        assert 50 < waits[-1] < waits[0] <= 60
        assert {(one.cursor, one.step, one.target, one.epoch) for one in asked} == {(4, 5, 8, 3)}


def test_a_wait_goes_on_after_the_service_was_restarted() -> None:
    """The whole server goes away and comes back on its port, as in a rolling restart."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = lambda request, context: until_cancelled(context, progress(0))
        outcome: list[int] = []
        thread = threading.Thread(
            target=lambda: outcome.append(client.wait_for_sampleable(wait_request(max_wait=duration(30))).outcome)
        )
        thread.start()
        service.wait_for("WaitForSampleable")
        service.stop()
        service.script["WaitForSampleable"] = events(REACHED)
        service.start()
        thread.join(20)
        assert outcome == [buffer_pb2.WAIT_OUTCOME_REACHED]
        assert len(service.requests("WaitForSampleable")) == 2


def test_a_stream_that_ends_without_a_final_event_is_torn() -> None:
    """A proxy that closes a stream in order must not make the trainer believe that its target is reached."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = in_turn(events(progress(1)), events(REACHED))
        assert client.wait_for_sampleable(wait_request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED


def test_an_event_of_a_newer_service_is_passed_over() -> None:
    """An old client must survive a new kind of event."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(wait_event(), REACHED)
        assert client.wait_for_sampleable(wait_request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert len(service.requests("WaitForSampleable")) == 1


def test_an_error_of_the_service_ends_a_wait() -> None:
    """A deleted run must not be waited for."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = failing(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
        with pytest.raises(NotFound):
            client.wait_for_sampleable(wait_request())
        assert len(service.requests("WaitForSampleable")) == 1


def test_an_early_time_out_of_the_service_is_not_ours() -> None:
    """A deadline imposed on the way ends one arming; the caller asked for more."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = in_turn(events(TIMED_OUT), events(REACHED))
        assert client.wait_for_sampleable(wait_request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        service.script["WaitForSampleable"] = events(TIMED_OUT)
        answer = client.wait_for_sampleable(wait_request(max_wait=duration(0)))
        assert answer.outcome == buffer_pb2.WAIT_OUTCOME_TIMED_OUT
        assert len(service.requests("WaitForSampleable")) == 3


def test_a_wait_ends_when_its_time_is_over_and_nobody_answers() -> None:
    """max_wait has to bound a wait whose service is gone, too."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = DRAINING
        with pytest.raises(Unavailable):
            client.wait_for_sampleable(wait_request(max_wait=duration(0.3)))


def test_a_service_that_accepts_and_then_forgets_a_wait_is_found_out() -> None:
    """The client's own deadline stands a little after max_wait, in case the service never answers."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = lambda request, context: until_cancelled(context)
        with pytest.raises(DeadlineExceeded):
            client.wait_for_sampleable(wait_request(max_wait=duration(0.2)))


def test_a_wait_without_an_end_gives_up_after_an_outage() -> None:
    """A service that never comes back must end in an error that says so, not in a trainer that waits for weeks."""
    options = ClientOptions(timeouts=Timeouts(outage=0.3), retry=RetryPolicy(initial=0.05, maximum=0.05))
    with fake("buffer") as service, BufferClient(service.target, options) as client:
        service.script["WaitForSampleable"] = DRAINING
        with pytest.raises(Unavailable, match="DRAINING"):
            client.wait_for_sampleable(wait_request())
        assert len(service.requests("WaitForSampleable")) > 2


def test_a_quiet_watch_goes_on_after_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that had nothing to say for longer than an outage may last was there all the time."""
    monkeypatch.setattr("turnout.client._retry._ALIVE_S", 0.6)
    options = ClientOptions(timeouts=Timeouts(outage=0.3), retry=RetryPolicy(initial=0.01, maximum=0.02))
    cut = threading.Event()

    def quiet(request: Any, context: Any) -> Iterator[Any]:
        cut.wait(0.7)
        fail(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")
        yield

    depth = buffer_pb2.WatchDepthResponse(depth=buffer_pb2.Depth(sampleable=3))
    with fake("buffer") as service, BufferClient(service.target, options) as client:
        service.script["WatchDepth"] = in_turn(quiet, events(depth))
        seen = list(client.watch_depth(buffer_pb2.WatchDepthRequest(run_id="r1", partition="train")))
    assert [one.sampleable for one in seen] == [3]


def test_leaving_a_wait_by_an_exception_ends_the_call_at_the_service() -> None:
    """A wait that lives on at the service would be shown the next refill claim."""
    gone = threading.Event()

    def handle(request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(gone.set)
        yield progress(0)
        gone.wait(10)

    def interrupt(event: Any) -> None:
        raise KeyboardInterrupt

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = handle
        with pytest.raises(KeyboardInterrupt):
            client.wait_for_sampleable(wait_request(), on_progress=interrupt)
        assert gone.wait(10)


# --------------------------------------------------------------------------------------------------------------- sample


def part(*ids: str) -> buffer_pb2.SampleResponse:
    groups = [buffer_pb2.SampledGroup(group_id=group_id) for group_id in ids]
    return buffer_pb2.SampleResponse(groups=buffer_pb2.SampledGroups(groups=groups))


def sampled(count: int) -> buffer_pb2.SampleResponse:
    return buffer_pb2.SampleResponse(
        done=buffer_pb2.SampleDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED, lease_id="l1", group_count=count)
    )


def test_a_sample_cut_in_its_manifest_is_asked_for_again_under_the_same_id() -> None:
    """The batch was leased; a second id would lease a second batch and lose the first one."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["Sample"] = in_turn(torn_after(part("a")), events(part("a"), part("b"), sampled(2)))
        answer = client.sample(sample_request())
        assert [group.group_id for group in answer.groups] == ["a", "b"]
        assert answer.done.lease_id == "l1"
        first, second = service.requests("Sample")
        assert first.request_id == second.request_id != ""


def test_a_manifest_with_a_part_missing_is_never_given_out() -> None:
    """Training on 1 of 2 groups because a part got lost would go unnoticed."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["Sample"] = in_turn(events(part("a"), sampled(2)), events(part("a", "b"), sampled(2)))
        assert len(client.sample(sample_request()).groups) == 2
        service.script["Sample"] = events(part("a"), sampled(2))
        with pytest.raises(Unavailable, match="1 of 2 groups"):
            client.sample(sample_request(max_wait=duration(0)))


# -------------------------------------------------------------------------------------------------------------- refills


def refill(count: int, claim: str = "c1") -> buffer_pb2.WaitForSampleableResponse:
    return wait_event(refill_due=buffer_pb2.RefillDue(count=count, refill_claim_id=claim))


def prompts(*ids: str) -> list[buffer_pb2.GroupSpec]:
    return [buffer_pb2.GroupSpec(group_id=group_id) for group_id in ids]


def unpaid(count: int) -> Any:
    return lambda request, context: buffer_pb2.AddGroupsResponse(refill_remaining=count)


def test_refills_are_paid_on_the_waiting_thread() -> None:
    """A trainer with one thread must be able to refill from inside its wait, as its data loader does."""
    threads: list[int] = []

    def refill_fn(count: int) -> list[buffer_pb2.GroupSpec]:
        threads.append(threading.get_ident())
        return prompts("new-1", "new-2")[:count]

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(2), REACHED)
        client.wait_for_sampleable(wait_request(), refill_fn=refill_fn)
        assert threads == [threading.get_ident()]
        (paid,) = service.requests("AddGroups")
        assert (paid.refill_claim_id, paid.step, paid.epoch, paid.partition) == ("c1", 5, 3, "train")
        assert [group.group_id for group in paid.groups] == ["new-1", "new-2"]
        assert paid.request_id
        assert not service.requests("DeclineRefill")


async def test_a_refill_function_may_be_a_coroutine_function() -> None:
    """An asyncio trainer reads its prompts without blocking the loop."""

    async def refill_fn(count: int) -> list[buffer_pb2.GroupSpec]:
        return prompts("new")

    with fake("buffer") as service:
        service.script["Sample"] = events(
            buffer_pb2.SampleResponse(refill_due=buffer_pb2.RefillDue(count=1, refill_claim_id="c1")),
            part("a"),
            sampled(1),
        )
        async with AsyncBufferClient(service.target, QUICK) as client:
            await client.sample(sample_request(), refill_fn=refill_fn)
        assert [group.group_id for group in service.requests("AddGroups")[0].groups] == ["new"]


def test_a_coroutine_function_is_refused_by_a_blocking_client() -> None:
    """Without an event loop it would never run, and the wait would never end."""

    async def refill_fn(count: int) -> None:
        return None

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(2), REACHED)
        with pytest.raises(TypeError, match="coroutine function"):
            client.wait_for_sampleable(wait_request(), refill_fn=refill_fn)


@pytest.mark.parametrize("answer", [None, []])
def test_no_more_prompts_declines_the_claim(answer: list[Any] | None) -> None:
    """An unpaid claim that is never declined is a wait that never ends."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(2), done(buffer_pb2.WAIT_OUTCOME_EXHAUSTED))
        ended = client.wait_for_sampleable(wait_request(), refill_fn=lambda count: answer)
        assert ended.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        (declined,) = service.requests("DeclineRefill")
        assert (declined.refill_claim_id, declined.epoch) == ("c1", 3)
        assert not service.requests("AddGroups")


def test_fewer_prompts_than_asked_pays_and_declines_the_rest() -> None:
    """The last prompts of a data set must be used, and the end of it be known."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(3), REACHED)
        service.script["AddGroups"] = unpaid(2)
        client.wait_for_sampleable(wait_request(), refill_fn=lambda count: prompts("last"))
        assert service.names() == ["WaitForSampleable", "AddGroups", "DeclineRefill"]


def test_more_prompts_than_asked_is_an_error() -> None:
    """The surplus would otherwise vanish or overpay the claim."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(1), REACHED)
        with pytest.raises(ValueError, match="returned 2 groups when asked for 1"):
            client.wait_for_sampleable(wait_request(), refill_fn=lambda count: prompts("a", "b"))
        assert not service.requests("AddGroups")


def test_without_a_refill_function_the_claim_is_left_to_others() -> None:
    """Someone else may pay it; declining would end supply."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = events(refill(1), REACHED)
        client.wait_for_sampleable(wait_request())
        assert service.names() == ["WaitForSampleable"]


def test_prompts_that_could_not_be_added_are_kept_for_the_claim_when_it_is_shown_again() -> None:
    """Asking the data set again after a cut would skip the prompts that were read before it."""
    read = iter(["first", "second"])
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = in_turn(events(refill(1)), events(refill(1), REACHED))
        service.script["AddGroups"] = in_turn(
            *[failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 3,
            failing(grpc.StatusCode.DEADLINE_EXCEEDED),
            unpaid(0),
        )
        refills = client.refills(lambda count: prompts(next(read)), run_id="r1", partition="train", epoch=3)
        with pytest.raises(DeadlineExceeded):
            client.wait_for_sampleable(wait_request(), refills=refills)
        client.wait_for_sampleable(wait_request(), refills=refills)
        paid = service.requests("AddGroups")
        assert [group.group_id for one in paid for group in one.groups] == ["first"] * len(paid)
        assert len({one.request_id for one in paid}) == 1
        assert next(read) == "second"


def test_prompts_that_can_never_be_added_are_not_offered_for_ever() -> None:
    """One whose upload ran out during an outage would end every later wait with the same error."""
    read = iter(["first", "second"])
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WaitForSampleable"] = in_turn(events(refill(1)), events(refill(1), REACHED))
        service.script["AddGroups"] = in_turn(failing(grpc.StatusCode.NOT_FOUND, "PAYLOAD_NOT_FOUND"), unpaid(0))
        refills = client.refills(lambda count: prompts(next(read)), run_id="r1", partition="train", epoch=3)
        with pytest.raises(NotFound):
            client.wait_for_sampleable(wait_request(), refills=refills)
        client.wait_for_sampleable(wait_request(), refills=refills)
        paid = service.requests("AddGroups")
        assert [group.group_id for one in paid for group in one.groups] == ["first", "second"]


# --------------------------------------------------------------------------------------------------- watches, scheduler


def test_a_watch_goes_on_with_the_event_after_the_last_one_seen() -> None:
    """Without it, a reader misses events or counts some twice after each restart."""

    def batch(*sequences: int) -> scheduler_pb2.WatchRunResponse:
        return scheduler_pb2.WatchRunResponse(events=[events_pb2.RunEvent(sequence=number) for number in sequences])

    with fake("scheduler") as service, SchedulerClient(service.target, QUICK) as client:
        service.script["WatchRun"] = in_turn(torn_after(batch(1, 2)), DRAINING, events(batch(3), batch(4)))
        request = scheduler_pb2.WatchRunRequest(run_id="r1", from_sequence=1)
        assert [event.sequence for event in client.watch_run(request)] == [1, 2, 3, 4]
        assert [asked.from_sequence for asked in service.requests("WatchRun")] == [1, 3, 3]
        assert request.from_sequence == 1


def test_closing_a_watch_early_ends_it_at_the_service() -> None:
    """`turnout top` that is closed must not leave a stream behind."""
    gone = threading.Event()

    def handle(request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(gone.set)
        yield buffer_pb2.WatchDepthResponse(depth=buffer_pb2.Depth(sampleable=3))
        gone.wait(10)

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["WatchDepth"] = handle
        watching = client.watch_depth(buffer_pb2.WatchDepthRequest(run_id="r1"))
        assert next(watching).sampleable == 3
        watching.close()
        assert gone.wait(10)


def prepared(outcome: buffer_pb2.WaitOutcome.ValueType) -> scheduler_pb2.PrepareStepResponse:
    return scheduler_pb2.PrepareStepResponse(done=scheduler_pb2.PrepareStepDone(outcome=outcome))


def test_a_torn_prepare_step_keeps_its_attempt_and_a_timed_out_one_takes_the_next() -> None:
    """The attempt is part of the call's identity: too high is out of order, too low is the old answer for ever."""
    with fake("scheduler") as service, SchedulerClient(service.target, QUICK) as client:
        service.script["PrepareStep"] = in_turn(
            DRAINING,
            events(prepared(buffer_pb2.WAIT_OUTCOME_TIMED_OUT)),
            events(prepared(buffer_pb2.WAIT_OUTCOME_HELD)),
            events(prepared(buffer_pb2.WAIT_OUTCOME_REACHED)),
        )
        answer = client.prepare_step(scheduler_pb2.PrepareStepRequest(run_id="r1", epoch=3, step=5, cursor=4))
        assert answer.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        asked = service.requests("PrepareStep")
        assert [one.attempt for one in asked] == [0, 0, 1, 2]
        assert {one.cursor for one in asked} == {4}


def test_begin_sample_tells_the_attempt_of_the_next_call() -> None:
    """After a LEND the trainer has to call again with exactly one more."""

    def begun(**answer: Any) -> scheduler_pb2.BeginSampleResponse:
        return scheduler_pb2.BeginSampleResponse(done=scheduler_pb2.BeginSampleDone(**answer))

    with fake("scheduler") as service, SchedulerClient(service.target, QUICK) as client:
        service.script["BeginSample"] = in_turn(
            events(begun(timed_out=scheduler_pb2.TimedOut())), events(begun(lend=scheduler_pb2.Lend(lend_id="l1")))
        )
        answer, attempt = client.begin_sample(scheduler_pb2.BeginSampleRequest(run_id="r1", epoch=3, step=5))
        assert answer.lend.lend_id == "l1"
        assert attempt == 2


def test_a_scheduler_wait_pays_refills_at_the_buffer() -> None:
    """PrepareStep shows the buffer's claims; the prompts go to the buffer, with the trainer's epoch."""
    with (
        fake("scheduler") as scheduler,
        fake("buffer") as buffer,
        SchedulerClient(scheduler.target, QUICK) as client,
        BufferClient(buffer.target, QUICK) as prompts_go_to,
    ):
        scheduler.script["PrepareStep"] = events(
            scheduler_pb2.PrepareStepResponse(refill_due=buffer_pb2.RefillDue(count=1, refill_claim_id="c9")),
            prepared(buffer_pb2.WAIT_OUTCOME_REACHED),
        )
        refills = prompts_go_to.refills(lambda count: prompts("new"), run_id="r1", partition="train", epoch=3)
        client.prepare_step(scheduler_pb2.PrepareStepRequest(run_id="r1", epoch=3, step=5), refills=refills)
        (paid,) = buffer.requests("AddGroups")
        assert (paid.refill_claim_id, paid.step, paid.epoch) == ("c9", 5, 3)


def test_a_watch_that_starts_now_goes_on_from_what_it_has_seen() -> None:
    """Re-arming 'from now on' would skip what happened during the cut."""

    def batch(*sequences: int) -> buffer_pb2.WatchGroupsResponse:
        return buffer_pb2.WatchGroupsResponse(events=[buffer_pb2.GroupEvent(sequence=number) for number in sequences])

    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        # Progress events have no number of their own.
        service.script["WatchGroups"] = in_turn(torn_after(batch(41, 0)), events(batch(42)))
        watched = client.watch_groups(buffer_pb2.WatchGroupsRequest(run_id="r1"))
        assert [event.sequence for event in watched] == [41, 0, 42]
        first, second = service.requests("WatchGroups")
        assert not first.HasField("from_sequence")
        assert second.from_sequence == 42
