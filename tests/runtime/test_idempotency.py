"""Repeatable calls."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.errors import Code, TurnoutError, unavailable
from services.runtime.idempotency import FEW, RECENT_S, Answers, fingerprint


class Work:
    """Counts how often it was done; can be made to fail, or to wait."""

    def __init__(self) -> None:
        self.done = 0
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def __call__(self) -> int:
        if self.gate:
            await self.gate.wait()
        if self.failure:
            raise self.failure
        self.done += 1
        return self.done


async def test_a_repeat_gets_the_first_answer() -> None:
    """A retry after a lost answer would otherwise take a second batch."""
    answers, work = Answers(), Work()
    for _ in range(3):
        assert await answers.once("run", "Sample", "r1", b"x", 0, work) == 1
    assert work.done == 1


async def test_without_request_id_every_call_counts() -> None:
    """Proto3 cannot tell "" from unset, so "" must not join unrelated calls."""
    answers, work = Answers(), Work()
    assert [await answers.once("run", "Sample", "", b"x", 0, work) for _ in range(2)] == [1, 2]
    assert len(answers) == 0


@pytest.mark.parametrize(("call", "content"), [("Sample", b"y"), ("AddGroups", b"x")])
async def test_h17_an_id_reused_for_something_else_is_refused(call: str, content: bytes) -> None:
    """Answering with the first result would hide that the second request was never carried out."""
    answers, work = Answers(), Work()
    await answers.once("run", "Sample", "r1", b"x", 0, work)
    with pytest.raises(TurnoutError) as caught:
        await answers.once("run", call, "r1", content, 0, work)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
    assert work.done == 1


async def test_runs_do_not_share_ids() -> None:
    """Two trainers may number their requests alike."""
    answers, work = Answers(), Work()
    assert await answers.once("a", "Sample", "1", b"x", 0, work) == 1
    assert await answers.once("b", "Sample", "1", b"y", 0, work) == 2


async def test_duplicates_at_the_same_time_join_the_first() -> None:
    """A client's retry can arrive while the first attempt is still at work."""
    answers, work = Answers(), Work()
    work.gate = asyncio.Event()
    calls = [asyncio.create_task(answers.once("run", "Sample", "r1", b"x", 0, work)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(TurnoutError, match="REQUEST_ID_REUSED"):
        await answers.once("run", "Sample", "r1", b"y", 0, work)
    work.gate.set()
    assert await asyncio.gather(*calls) == [1] * 5


async def test_a_failure_is_not_kept() -> None:
    """UNAVAILABLE answered for ever would make the retry that it invites useless."""
    answers, work = Answers(), Work()
    work.failure = unavailable("BUSY", "later")
    with pytest.raises(TurnoutError):
        await answers.once("run", "Sample", "r1", b"x", 0, work)
    work.failure = None
    assert await answers.once("run", "Sample", "r1", b"x", 0, work) == 1


async def test_a_duplicate_takes_over_when_the_first_caller_goes_away() -> None:
    """The first attempt's connection broke; the duplicate must neither hang nor get its cancellation."""
    answers, work = Answers(), Work()
    work.gate = asyncio.Event()
    first = asyncio.create_task(answers.once("run", "Sample", "r1", b"x", 0, work))
    await asyncio.sleep(0)
    second = asyncio.create_task(answers.once("run", "Sample", "r1", b"x", 0, work))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    work.gate.set()
    assert await second == 1


async def test_answers_expire_and_are_bounded() -> None:
    """Kept for ever, they would be a leak in a service that runs for weeks."""
    answers, work = Answers(ttl_s=10, limit=3), Work()
    for number in range(5):
        await answers.once("run", "Sample", str(number), b"x", number, work)
    assert len(answers) == 3
    assert await answers.once("run", "Sample", "4", b"x", 13.9, work) == 5
    assert await answers.once("run", "Sample", "4", b"x", 14, work) == 6
    answers.forget_run("run")
    assert len(answers) == 0


async def test_only_few_old_answers_are_kept_beside_the_recent_ones() -> None:
    """A hundred workers get more answers in an hour than memory should hold, and repeat no call after minutes."""
    answers, work = Answers(), Work()
    for number in range(3 * FEW):
        await answers.once("run", "FinishTrajectories", str(number), b"x", 0, work)
    assert len(answers) == 3 * FEW
    await answers.once("run", "FinishTrajectories", "soon", b"x", RECENT_S - 1, work)
    assert len(answers) == 3 * FEW + 1
    await answers.once("run", "FinishTrajectories", "late", b"x", RECENT_S, work)
    assert len(answers) == FEW
    # The newest are those that stay.
    assert answers.has("run", "soon", RECENT_S)
    assert answers.has("run", str(3 * FEW - 1), RECENT_S)
    assert not answers.has("run", "0", RECENT_S)


async def test_messages_are_kept_as_bytes_and_told_again_as_messages() -> None:
    """A message that lives takes a kilobyte, however little it says."""
    answers, first = Answers(), Value(number_value=1)

    async def execute() -> Value:
        return first

    assert await answers.once("run", "Sample", "r1", b"x", 0, execute) is first
    [(_, kept)] = answers.kept("run")
    assert not isinstance(kept.held, Message)
    assert kept.value == first
    first.number_value = 2  # whoever got the first answer may do with it what it likes
    assert await answers.once("run", "Sample", "r1", b"x", 0, execute) == Value(number_value=1)


async def test_an_answer_that_took_long_expires_in_its_time() -> None:
    """It is kept behind younger ones, whose age says nothing of its own."""
    answers, slow, quick = Answers(ttl_s=10), Work(), Work()
    slow.gate = asyncio.Event()
    first = asyncio.ensure_future(answers.once("run", "Sample", "slow", b"x", 0, slow))
    await asyncio.sleep(0)
    await answers.once("run", "Sample", "quick", b"x", 5, quick)
    slow.gate.set()
    await first
    assert await answers.once("run", "Sample", "slow", b"x", 9, slow) == 1
    assert await answers.once("run", "Sample", "slow", b"x", 11, slow) == 2


@given(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=5))
def test_a_fingerprint_depends_on_content_alone(content: dict[str, float]) -> None:
    """Maps have no order on the wire; a repeat serialised in another order is the same request."""
    one, other = Value(), Value()
    one.struct_value.update(content)
    other.struct_value.update(dict(reversed(content.items())))
    assert fingerprint(one) == fingerprint(other)


def test_a_fingerprint_leaves_out_what_a_repeat_may_change() -> None:
    """A re-armed wait asks for the time that is left, not for the time it first asked for."""
    one, other = Value(string_value="a"), Value(string_value="b")
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one, ignore=["string_value"]) == fingerprint(other, ignore=["string_value"])
    assert one.string_value == "a"
