"""Paying refill claims from inside a wait.

Invariants: the user's function is asked once per claim; what it returned is paid with one request id until the service
took it, also when the claim is shown again after a restart, so no prompt is lost and none is added twice; what it can
never take is raised, and the function is asked again; credits that the function does not cover are declined, which ends
supply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.client._calls import new_request_id
from turnout.client._errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from turnout.client._link import Link

RefillAnswer = Sequence[buffer_pb2.GroupSpec] | None
RefillFn = Callable[[int], RefillAnswer | Awaitable[RefillAnswer]]
"""Called with the number of prompts needed; returns at most that many, or None or fewer when there are no more."""


class PaysRefills(Protocol):
    """What a wait needs for its REFILL_DUE events."""

    async def pay(self, due: buffer_pb2.RefillDue, step: int) -> None:
        """Add prompts for a claim, or decline it."""
        ...


class Refills:
    """Answers REFILL_DUE events of one run and partition."""

    def __init__(
        self,
        calls: buffer_pb2_grpc.ReplayBufferAsyncStub,
        link: Link,
        refill_fn: RefillFn | None,
        *,
        run_id: str,
        partition: str,
        epoch: int | None,
    ) -> None:
        self._calls = calls
        self._link = link
        self._refill_fn = refill_fn
        self._where: dict[str, Any] = {"run_id": run_id, "partition": partition}
        if epoch is not None:
            self._where["epoch"] = epoch
        self._owed: dict[str, buffer_pb2.AddGroupsRequest] = {}

    async def pay(self, due: buffer_pb2.RefillDue, step: int) -> None:
        """Ask for prompts and add them at `step`. Without a refill function nothing happens: others may add prompts."""
        if self._refill_fn is None:
            return
        payment = self._owed.get(due.refill_claim_id)
        if payment is None:
            groups = list(await self._link.invoke(self._refill_fn, due.count) or ())
            if len(groups) > due.count:
                raise ValueError(f"refill_fn returned {len(groups)} groups when asked for {due.count}")
            payment = buffer_pb2.AddGroupsRequest(
                **self._where,
                step=step,
                groups=groups,
                refill_claim_id=due.refill_claim_id,
                request_id=new_request_id(),
            )
            self._owed[due.refill_claim_id] = payment
        unpaid = due.count
        if payment.groups:
            try:
                unpaid = (await self._calls.AddGroups(payment)).refill_remaining
            except (AlreadyExists, FailedPrecondition, InvalidArgument, NotFound):
                # It will never be taken, for example since an upload that it names has run out.
                del self._owed[due.refill_claim_id]
                raise
        if unpaid > 0:
            await self._calls.DeclineRefill(
                buffer_pb2.DeclineRefillRequest(**self._where, refill_claim_id=due.refill_claim_id)
            )
        del self._owed[due.refill_claim_id]
