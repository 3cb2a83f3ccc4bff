"""What the calls share: finding the run, the trainer's right, repeatable answers."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from services.buffer.desk import Desk
from services.buffer.domain.partition import Partition
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.run import Run
from services.buffer.wire.groups import outcome_to
from services.runtime.draining import Draining
from services.runtime.errors import TurnoutError, invalid_argument, require_id
from services.runtime.idempotency import Answers, fingerprint
from turnout.buffer.v1 import buffer_pb2 as pb

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")
M = TypeVar("M")

# What a repeat of a request may change, see the top of the proto.
NOT_CONTENT = ("epoch", "max_wait", "progress_interval", "cursor")


class BufferCalls:
    """Base of the servicer's parts."""

    def __init__(self, desk: Desk, draining: Draining, store: PayloadStore, max_message_bytes: int) -> None:
        self.desk = desk
        self.draining = draining
        self.store = store
        self.max_message_bytes = max_message_bytes
        # By call: a request_id is scoped to its run and call.
        self.answers: defaultdict[str, Answers] = defaultdict(Answers)

    def run(self, run_id: str) -> Run:
        """The run a request names."""
        return self.desk.runs.require(require_id("run_id", run_id))

    def place(self, run_id: str, partition: str) -> tuple[Run, Partition]:
        """The run and partition a request names."""
        run = self.run(run_id)
        return run, run.partition(require_id("partition", partition))

    def wall(self, domain_seconds: float) -> float:
        """Domain seconds as wall seconds, for the time left of a lease."""
        return domain_seconds * self.desk.clock.scale

    async def once(self, key: str, call: str, request: Message, request_id: str, execute: Callable[[], T]) -> T:
        """Do a mutation, or give the answer it gave before. `key` is the run, whose end forgets the answer."""
        if not request_id:
            return execute()
        require_id("request_id", request_id)

        async def run() -> T:
            return execute()

        now = self.desk.clock.now()
        return await self.answers[call].once(key, call, request_id, self.content(request), now, run)

    def forget_answers(self, key: str) -> None:
        """The run is gone."""
        for answers in self.answers.values():
            answers.forget_run(key)

    @staticmethod
    def content(request: Message) -> bytes:
        """What tells two requests of one id apart."""
        present = [name for name in NOT_CONTENT if name in request.DESCRIPTOR.fields_by_name]
        return fingerprint(request, present)


def each(items: Iterable[M], apply: Callable[[M], None]) -> list[pb.ItemOutcome]:
    """Apply a batch item by item; a bad item leaves the others alone."""
    outcomes: list[pb.ItemOutcome] = []
    for item in items:
        try:
            apply(item)
            outcomes.append(outcome_to(None))
        except TurnoutError as error:
            outcomes.append(outcome_to(error))
    return outcomes


def optional_epoch(request: Any) -> int | None:
    """The epoch of a request, if it carries one; negative ones were never granted."""
    if not request.HasField("epoch"):
        return None
    epoch: int = request.epoch
    if epoch < 0:
        raise invalid_argument("epoch", "epoch must not be negative", value=epoch, reason="OUT_OF_RANGE")
    return epoch


def required_step(request: Any) -> int:
    """The step of a request that needs one."""
    if not request.HasField("step"):
        raise invalid_argument("step", "step is required", reason="REQUIRED")
    step: int = request.step
    return step
