"""What a caller of a wait is told when it reads slowly."""

from services.scheduler.waiting import Caller
from turnout.buffer.v1 import buffer_pb2


def progress(sampleable: int) -> buffer_pb2.WaitProgress:
    return buffer_pb2.WaitProgress(depth=buffer_pb2.Depth(sampleable=sampleable))


def refill(claim_id: str, count: int) -> buffer_pb2.RefillDue:
    return buffer_pb2.RefillDue(refill_claim_id=claim_id, count=count)


async def test_a_slow_caller_gets_the_newest_progress_and_every_refill_once() -> None:
    """A trainer that fetches prompts for a minute must neither fill our memory nor pay a claim twice."""
    caller = Caller(deadline=0.0)
    for sampleable in range(1000):
        caller.tell(progress(sampleable))
    caller.tell(refill("a", 3))
    caller.tell(refill("b", 1))
    caller.tell(refill("a", 2))
    caller.end()
    assert [await caller.next() for _ in range(4)] == [refill("a", 2), refill("b", 1), progress(999), None]
