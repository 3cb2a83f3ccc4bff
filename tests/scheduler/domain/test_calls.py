"""The order of calls, exhaustively: every position a trainer can reach, against every call it could make."""

from collections import deque

import pytest

from services.runtime.errors import Code, TurnoutError
from services.scheduler.domain.calls import (
    Call,
    CallKey,
    CallOrder,
    Ending,
    Phase,
    Position,
    advance,
    check,
    expected,
)

MINI_BATCHES = 2
LAST_STEP = 2
LEND = "lend-a"

ENDINGS = {
    Call.BEGIN_STEP: [Ending.DONE],
    Call.PREPARE_STEP: [Ending.DONE, Ending.EXHAUSTED, Ending.TIMED_OUT],
    Call.BEGIN_SAMPLE: [Ending.DONE, Ending.LEND, Ending.TIMED_OUT],
    Call.END_SAMPLE: [Ending.DONE],
    Call.END_STEP: [Ending.DONE, Ending.LEND],
    Call.BEGIN_VALIDATION: [Ending.DONE, Ending.LEND],
    Call.END_VALIDATION: [Ending.DONE],
    Call.COMPLETE_LEND: [Ending.DONE],
    Call.ABANDON_LEND: [Ending.DONE],
    Call.SAVE: [Ending.DONE],
}


def universe() -> list[CallKey]:
    """Every call that could be made, right ones and wrong ones."""
    steps, mini_batches, attempts = range(LAST_STEP + 3), range(MINI_BATCHES + 2), range(4)
    keys = [CallKey(call, step) for call in Call for step in steps]
    keys += [CallKey(Call.PREPARE_STEP, step, attempt=attempt) for step in steps for attempt in attempts]
    keys += [
        CallKey(Call.BEGIN_SAMPLE, step, mini_batch, attempt)
        for step in steps
        for mini_batch in mini_batches
        for attempt in attempts
    ]
    keys += [CallKey(Call.END_SAMPLE, step, mini_batch) for step in steps for mini_batch in mini_batches]
    keys += [CallKey(call, lend_id=lend) for call in (Call.COMPLETE_LEND, Call.ABANDON_LEND) for lend in (LEND, "b")]
    return keys


def reachable() -> set[Position]:
    """Every position of a job of two steps, with up to two repeats of a waiting call."""
    found = {Position(), Position(lend_id=LEND)}
    queue = deque(found)
    while queue:
        position = queue.popleft()
        for key in expected(position, MINI_BATCHES):
            for ending in ENDINGS[key.call]:
                lend_id = LEND if ending is Ending.LEND else ""
                after = advance(position, key, ending, lend_id)
                if after.step <= LAST_STEP and after.attempt <= 2 and after not in found:
                    found.add(after)
                    queue.append(after)
    return found


def test_every_call_that_is_not_expected_is_refused_and_names_what_is() -> None:
    """One illegal call let through would let a trainer train on GPUs that generate, or lend twice."""
    positions = reachable()
    assert len(positions) > 40
    for position in positions:
        options = expected(position, MINI_BATCHES)
        assert options, f"{position} is a dead end"
        for key in universe():
            if key in options:
                check(position, MINI_BATCHES, key)
                continue
            with pytest.raises(TurnoutError) as caught:
                check(position, MINI_BATCHES, key)
            assert caught.value.code is Code.FAILED_PRECONDITION
            assert caught.value.reason == "OUT_OF_ORDER"
            assert caught.value.metadata["expected"] == str(options[0])
            assert caught.value.metadata["called"] == str(key)


def test_while_a_lend_is_open_only_closing_it_is_expected() -> None:
    """A trainer that goes on with a lend half done would train on GPUs whose replicas are held."""
    for position in reachable():
        if position.lend_id:
            calls = {key.call for key in expected(position, MINI_BATCHES)}
            assert calls == {Call.COMPLETE_LEND, Call.ABANDON_LEND}


def test_a_step_takes_all_its_mini_batches_in_order() -> None:
    """A mini-batch that is skipped or asked for beyond the last would shift every wait of the step."""
    position = Position(Phase.PREPARED, 1)
    for number in range(MINI_BATCHES):
        assert expected(position, MINI_BATCHES)[0] == CallKey(Call.BEGIN_SAMPLE, 1, number)
        position = advance(position, CallKey(Call.BEGIN_SAMPLE, 1, number))
        assert expected(position, MINI_BATCHES) == (CallKey(Call.END_SAMPLE, 1, number),)
        position = advance(position, CallKey(Call.END_SAMPLE, 1, number))
    assert expected(position, MINI_BATCHES)[0] == CallKey(Call.END_STEP, 1)


def test_a_step_ends_early_only_after_a_mini_batch_or_when_prompts_ran_out() -> None:
    """Otherwise a trainer whose data ends could never end its step, or steps could be empty."""
    prepared = advance(Position(Phase.BEGUN, 1), CallKey(Call.PREPARE_STEP, 1))
    exhausted = advance(Position(Phase.BEGUN, 1), CallKey(Call.PREPARE_STEP, 1), Ending.EXHAUSTED)
    assert CallKey(Call.END_STEP, 1) not in expected(prepared, MINI_BATCHES)
    assert CallKey(Call.END_STEP, 1) in expected(exhausted, MINI_BATCHES)
    sampled = advance(prepared, CallKey(Call.BEGIN_SAMPLE, 1, 0))
    assert CallKey(Call.END_STEP, 1) in expected(advance(sampled, CallKey(Call.END_SAMPLE, 1, 0)), MINI_BATCHES)


def test_a_call_cannot_end_in_a_way_it_does_not_have() -> None:
    """EndSample that answers LEND would be a fault of ours, to be noticed at once."""
    with pytest.raises(AssertionError, match="EndSample"):
        advance(Position(Phase.SAMPLING, 1), CallKey(Call.END_SAMPLE, 1), Ending.LEND, LEND)


def test_a_repeat_gets_the_first_answer_whatever_came_after() -> None:
    """A lost reply would otherwise leave the trainer with OUT_OF_ORDER for the rest of its life."""
    order = CallOrder(Position(), MINI_BATCHES)
    begin, prepare = CallKey(Call.BEGIN_STEP, 1), CallKey(Call.PREPARE_STEP, 1)
    assert order.answer(begin, b"x") is None
    order.done(begin, b"x", "first")
    order.done(prepare, b"y", "second")
    assert order.answer(begin, b"x") == "first"
    assert order.answer(prepare, b"y") == "second"


def test_a_repeat_with_other_content_is_refused() -> None:
    """Answering it with the first answer would hide that the trainer meant something else."""
    order = CallOrder(Position(), MINI_BATCHES)
    order.done(CallKey(Call.BEGIN_STEP, 1), b"x", "first")
    with pytest.raises(TurnoutError) as caught:
        order.answer(CallKey(Call.BEGIN_STEP, 1), b"z")
    assert caught.value.reason == "CALL_CHANGED"


def test_answers_are_kept_up_to_a_number() -> None:
    """A job of a million calls must not keep a million answers."""
    order = CallOrder(Position(), MINI_BATCHES, keep=2)
    keys = [CallKey(Call.BEGIN_STEP, 1), CallKey(Call.PREPARE_STEP, 1), CallKey(Call.BEGIN_SAMPLE, 1)]
    for key in keys:
        order.done(key, b"", key.call.value)
    assert order.answer(keys[0], b"") is None
    assert order.answer(keys[1], b"") == "PrepareStep"


def test_the_lend_of_the_start_is_to_be_closed_first() -> None:
    """A step that begins before CompleteLend would reclaim replicas that never had weights."""
    order = CallOrder(Position(step=4), MINI_BATCHES)
    order.lending(LEND)
    with pytest.raises(TurnoutError, match="CompleteLend"):
        order.check(CallKey(Call.BEGIN_STEP, 5))
    order.done(CallKey(Call.ABANDON_LEND, lend_id=LEND), b"", "abandoned")
    order.check(CallKey(Call.BEGIN_STEP, 5))
    assert [str(key) for key in order.expected()] == ["BeginStep(step=5)", "BeginValidation(step=4)", "Save(step=4)"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (CallKey(Call.PREPARE_STEP, 3, attempt=1), "PrepareStep(step=3, attempt=1)"),
        (CallKey(Call.BEGIN_SAMPLE, 3, 2, 1), "BeginSample(step=3, mini_batch=2, attempt=1)"),
        (CallKey(Call.END_SAMPLE, 3, 2), "EndSample(step=3, mini_batch=2)"),
        (CallKey(Call.COMPLETE_LEND, lend_id="x"), "CompleteLend(lend_id=x)"),
        (CallKey(Call.SAVE, 3), "Save(step=3)"),
    ],
)
def test_a_call_is_named_with_what_tells_it_apart(key: CallKey, text: str) -> None:
    """The name stands in errors and in GetRun; a number missing there sends people looking in the wrong place."""
    assert str(key) == text
