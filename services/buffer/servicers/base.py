"""What the calls share: finding the run, the trainer's right, repeatable answers."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from services.buffer.desk import Desk
from services.buffer.domain.partition import Partition
from services.buffer.domain.payloads import PayloadStore
from services.buffer.domain.run import Run
from services.buffer.storage.checkpoints import Checkpoints
from services.runtime.draining import Draining
from services.runtime.errors import invalid_argument, require_id
from services.runtime.idempotency import fingerprint
from turnout.buffer.storage.v1 import storage_pb2 as st

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")

# What a repeat of a request may change, see the top of the proto.
NOT_CONTENT = ("epoch", "max_wait", "progress_interval", "cursor")


class BufferCalls:
    """Base of the servicer's parts."""

    def __init__(
        self, desk: Desk, draining: Draining, max_message_bytes: int, checkpoints: Checkpoints | None = None
    ) -> None:
        """Without `checkpoints` there are none."""
        self.desk = desk
        self.draining = draining
        self.max_message_bytes = max_message_bytes
        self.checkpoints = checkpoints

    @property
    def store(self) -> PayloadStore:
        """Where payload bytes are; another one after a failure."""
        return self.desk.store

    def run(self, run_id: str) -> Run:
        """The run a request names."""
        self.desk.check()
        return self.desk.runs.require(require_id("run_id", run_id))

    def place(self, run_id: str, partition: str) -> tuple[Run, Partition]:
        """The run and partition a request names."""
        run = self.run(run_id)
        return run, run.partition(require_id("partition", partition))

    def asked(self, run: Run) -> None:
        """Count a request against the run's cap; not for calls that settle, renew, free or pay anything.

        Raises RESOURCE_EXHAUSTED / CAP_REQUEST_RATE.
        """
        if run.state.config.caps.max_request_rate is not None:
            run.check_rate(self.desk.clock.now() * self.desk.clock.scale)

    def wall(self, domain_seconds: float) -> float:
        """Domain seconds as wall seconds, for the time left of a lease."""
        return domain_seconds * self.desk.clock.scale

    async def once(
        self, key: str, call: str, request: Message, request_id: str, execute: Callable[[st.Record], T]
    ) -> T:
        """Do a mutation, or give the answer it gave before, once that is durable.

        `execute` gets the record of what it does, which has the request's id. `key` is the run, whose end forgets the
        answer.
        """
        if not request_id:
            answer = execute(st.Record())
            await self.desk.durable()
            return answer
        require_id("request_id", request_id)
        content = self.content(request)

        async def run() -> T:
            return execute(st.Record(request_id=request_id, fingerprint=content))

        answers = self.desk.memory.answers[call]
        answer = await answers.once(key, call, request_id, content, self.desk.clock.now(), run)
        await self.desk.durable()
        return answer

    async def admit(self, call: str = "", run_id: str = "", request_id: str = "") -> None:
        """Wait for room for what a call brings. Raises RESOURCE_EXHAUSTED / DISK_FULL.

        A repeat brings nothing: refused, it would say that nothing happened when it did.
        """
        if request_id and self.desk.memory.answers[call].has(run_id, request_id, self.desk.clock.now()):
            return
        self.desk.check_space()
        await self.store.room()

    @staticmethod
    def content(request: Message) -> bytes:
        """What tells two requests of one id apart."""
        present = [name for name in NOT_CONTENT if name in request.DESCRIPTOR.fields_by_name]
        return fingerprint(request, present)


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
