"""The calls that act on memory, scheduling and caches of replicas.

Invariants: what is wrong for a replica's state is refused before anything reaches its engine; done means that a probe
confirmed it. Timeouts are wall seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Final

from services.engine.deadline import Deadline
from services.engine.domain.calls import Plan
from services.engine.domain.operations import Operation
from services.engine.domain.replica import Replica
from services.engine.domain.spec import WEIGHTS, Cache, PauseMode
from services.engine.fanout import FanOut, Result, Target, carry_out
from services.engine.slot import Slot
from services.runtime.errors import aborted, deadline_exceeded, failed_precondition, invalid_argument, permission_denied

FAULT_PREFIX: Final = "fault_"
"""Methods of this prefix break an engine on purpose. They do not queue, since a hung engine has to be healed too."""


class Commands:
    """Fan-outs of single calls."""

    def __init__(self, fan_out: FanOut, allowed_methods: frozenset[str]) -> None:
        self._fan_out = fan_out
        self._allowed_methods = allowed_methods

    async def sleep(self, target: Target, level: int | None, mode: PauseMode) -> Operation:
        """Free memory; None is level AUTO. KEEP is refused: the requests would lose their KV memory."""
        if mode is PauseMode.KEEP:
            raise invalid_argument("mode", "requests that are kept would lose their KV memory", value="KEEP")

        return await self._planned("Sleep", target, lambda replica: replica.plan_sleep(level, mode))

    async def wake_up(self, target: Target, tags: frozenset[str] | None) -> Operation:
        """Refill memory; None is all tags. An unknown tag refuses the whole call."""
        if tags is not None:
            for slot in target.slots:
                slot.replica.check_tags(tags)

        return await self._planned("WakeUp", target, lambda replica: replica.plan_wake(tags))

    async def release_kv_cache(self, target: Target) -> Operation:
        """Free KV memory."""
        return await self._planned("ReleaseKvCache", target, lambda replica: replica.plan_release_kv())

    async def resume_kv_cache(self, target: Target) -> Operation:
        """Refill KV memory."""
        return await self._planned("ResumeKvCache", target, lambda replica: replica.plan_resume_kv())

    async def pause(self, target: Target, mode: PauseMode, clear_cache: bool) -> Operation:
        """Stop scheduling."""
        return await self._planned("Pause", target, lambda replica: replica.plan_pause(mode, clear_cache))

    async def resume(self, target: Target) -> Operation:
        """Start scheduling."""
        return await self._planned("Resume", target, lambda replica: replica.plan_resume())

    async def reset_caches(
        self, target: Target, caches: frozenset[Cache], running: bool, connectors: bool
    ) -> Operation:
        """Empty caches; an empty set is all of them."""
        return await self._planned(
            "ResetCaches", target, lambda replica: replica.plan_reset(caches, running, connectors)
        )

    async def collective_rpc(self, target: Target, method: str, arguments_json: str, shard: int | None) -> Operation:
        """Call a method of the engines' workers, if the service was started with it allowed."""
        if method not in self._allowed_methods:
            raise permission_denied(
                "METHOD_NOT_ALLOWED", f"this service does not allow method {method!r}", field="method", value=method
            )
        _check_arguments(arguments_json)

        async def action(slot: Slot, deadline: Deadline) -> Result:
            backend = slot.backend
            if method.startswith(FAULT_PREFIX):
                try:
                    async with asyncio.timeout(deadline.left):
                        answer = await backend.collective_rpc(method, arguments_json, shard, deadline.left)
                except TimeoutError:
                    raise deadline_exceeded(
                        "ENGINE_TIMEOUT", f"{slot.replica_id} did not answer", replica_id=slot.replica_id
                    ) from None
                return Result(shards=answer.shards)
            async with slot.exclusive(deadline) as replica:
                if WEIGHTS in replica.asleep_tags:
                    raise failed_precondition(
                        "TAG_ASLEEP", f"{replica.replica_id}: its weights are asleep", replica_id=replica.replica_id
                    )
                work = backend.collective_rpc(method, arguments_json, shard, deadline.left)
                answer = await slot.command(work, deadline)
                await slot.refresh(deadline.left)
                expected = replica.spec.shards if shard is None else 1
                if sum(one.ok for one in answer.shards) < expected:
                    raise aborted(
                        "SHARDS_MISSED",
                        f"{method} reached {len(answer.shards)} of {expected} shards of {replica.replica_id}",
                        replica_id=replica.replica_id,
                    )
                return Result(shards=answer.shards)

        return await self._fan_out.run("CollectiveRpc", target, action)

    async def _planned(self, kind: str, target: Target, plan: Callable[[Replica], Plan]) -> Operation:
        async def action(slot: Slot, deadline: Deadline) -> Result:
            async with slot.exclusive(deadline) as replica:
                return await carry_out(slot, plan(replica), deadline)

        return await self._fan_out.run(kind, target, action)


def _check_arguments(arguments_json: str) -> None:
    if not arguments_json:
        return
    try:
        arguments = json.loads(arguments_json)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict) or not arguments.keys() <= {"args", "kwargs"}:
        raise invalid_argument("arguments_json", 'arguments are one JSON object {"args": [...], "kwargs": {...}}')
