"""Makes replicas ready to receive new weights.

Invariants: a replica that does not get ready is no part of the wave and goes on with its old weights if it can; an
engine is told of an update once by each controller.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from services.engine.deadline import Deadline
from services.engine.domain.kept import UpdateKind
from services.engine.domain.operations import Operation
from services.engine.domain.replica import Replica
from services.engine.domain.weights import Update
from services.engine.fanout import FanOut, Result, Target, carry_out
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.runtime.errors import TurnoutError, aborted
from services.runtime.logs import get_logger

_LOG = get_logger("engine")


class Preparing:
    """Prepares the replicas of a wave. `note` takes down a change of an update."""

    def __init__(self, fleet: Fleet, fan_out: FanOut, note: Callable[[Update], None]) -> None:
        self._fleet = fleet
        self._fan_out = fan_out
        self._note = note

    async def all(self, update: Update, wave: Set[str], timeout: float) -> Operation:
        """Prepare these replicas; those that do not get ready are left out."""
        slots = [slot for slot in self._fleet.all if slot.replica_id in wave]

        async def action(slot: Slot, deadline: Deadline) -> Result:
            try:
                async with slot.exclusive(deadline) as replica:
                    return await self._prepare(update, slot, replica, deadline)
            except TurnoutError:
                update.leave_out(slot.replica_id)
                self._note(update)
                raise

        return await self._fan_out.run("BeginWeightUpdate", Target(slots, timeout), action)

    async def _prepare(self, update: Update, slot: Slot, replica: Replica, deadline: Deadline) -> Result:
        if replica.update_id != update.update_id:
            replica.check_update(update.kind, update.version, adapter=update.adapter, allow_older=update.allow_older)
        plan = replica.open_update(update.update_id, update.kind, update.keep_requests)
        slot.changed()
        try:
            if update.kind is UpdateKind.AWAKE:
                update.tokens_recomputed += await self._tokens_running(slot, deadline)
            result = await carry_out(slot, plan, deadline)
            refuse_gone(update, replica)
            await self.start(update, slot, replica, deadline)
        except TurnoutError:
            await self._let_go(update, slot, replica, deadline)
            raise
        return Result(method=result.method, bytes_freed=result.bytes_freed)

    async def start(self, update: Update, slot: Slot, replica: Replica, deadline: Deadline) -> None:
        """Tell the engine of the update, unless this controller has."""
        if slot.replica_id in update.started:
            return
        work = slot.backend.start_weight_update(update.update_id, update.version, update.adapter, deadline.left)
        await slot.command(work, deadline)
        refuse_gone(update, replica)
        update.started.add(slot.replica_id)

    async def _let_go(self, update: Update, slot: Slot, replica: Replica, deadline: Deadline) -> None:
        """A replica did not get ready: no byte reached it, so it goes on with its old weights if it can."""
        if replica.update_id != update.update_id:
            return
        plan = replica.plan_abandon(touched=False)
        try:
            await slot.carry_out(plan, deadline)
        except TurnoutError as error:
            _LOG.warning("replica did not go on after a failed update", replica_id=slot.replica_id, reason=error.reason)

    @staticmethod
    async def _tokens_running(slot: Slot, deadline: Deadline) -> int:
        if not slot.forwards:
            return 0
        progress = await slot.command(slot.backend.progress(), deadline)
        return sum(
            forward.prompt_tokens + progress.output_tokens.get(forward.engine_id, forward.output_tokens)
            for forward in slot.forwards
        )


def refuse_gone(update: Update, replica: Replica) -> None:
    """Refuse to go on with a replica that was taken out of the update, with ABORTED / LEFT_UPDATE."""
    if replica.update_id != update.update_id:
        raise aborted(
            "LEFT_UPDATE",
            f"{replica.replica_id} was taken out of weight update {update.update_id!r}",
            replica_id=replica.replica_id,
            update_id=update.update_id,
        )
