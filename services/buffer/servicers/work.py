"""Calls that bring prompts in and hand trajectories out."""

from services.buffer import commands
from services.buffer.commands import each
from services.buffer.domain import work
from services.buffer.domain.claims import Claim
from services.buffer.domain.config import MAX_GROUP_SIZE, MAX_GROUPS_PER_CALL, MAX_ITEMS_PER_CALL, check_items
from services.buffer.domain.partition import Partition
from services.buffer.domain.run import Run
from services.buffer.servicers.base import BufferCalls, Context, optional_epoch, required_step
from services.buffer.wire.groups import claim_size, claim_to
from services.buffer.wire.outputs import token_from
from services.runtime.errors import Code, TurnoutError, invalid_argument, require_id
from services.runtime.logs import get_logger
from services.runtime.tracing import traceparent_of
from services.runtime.waits import deadline_after, duration_seconds, park, wait_budget
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

_log = get_logger("buffer")

# Claims in one answer: some 10 ms, for which every other call waits. A worker that wants more comes again.
MAX_CLAIMS = 1024
# Below the 4 MiB that many clients accept.
DEFAULT_CLAIM_BYTES = 3 << 20


class _NoWork(Exception):
    """The time passed with nothing to do: an answer without effect, which a repeat must not get again."""


class WorkCalls(BufferCalls):
    """AddGroups, ClaimGroups, SetIntake, RenewClaims, DeclineRefill, EvictGroups."""

    async def AddGroups(self, request: pb.AddGroupsRequest, context: Context) -> pb.AddGroupsResponse:
        """Admit prompts, all or none."""
        await self.admit("AddGroups", request.run_id, request.request_id)
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        run.check_epoch(optional_epoch(request))
        step = required_step(request)
        # Before anything is made of them.
        check_items("groups", len(request.groups), MAX_GROUPS_PER_CALL)
        trace = traceparent_of(context)

        def execute(record: st.Record) -> pb.AddGroupsResponse:
            at = self.desk.moment()
            answer = commands.add_groups(run, request, at)
            if trace:
                partition.trace([group.group_id for group in request.groups], trace)
            if self.desk.journal is not None:
                record.add_groups = request.SerializeToString()
                self.desk.record(run, record, at)
            self.desk.contact(run, step)
            self.desk.changed(run, partition)
            return answer

        return await self.once(request.run_id, "AddGroups", request, request.request_id, execute)

    async def ClaimGroups(self, request: pb.ClaimGroupsRequest, context: Context) -> pb.ClaimGroupsResponse:
        """Hand pending trajectories to a worker, waiting for some."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        require_id("worker_id", request.worker_id)
        limit = request.max_trajectories if request.HasField("max_trajectories") else 1
        if not 1 <= limit <= MAX_GROUP_SIZE:
            message = f"max_trajectories must be 1 to {MAX_GROUP_SIZE}, it is {limit}"
            raise invalid_argument("max_trajectories", message, value=limit, reason="OUT_OF_RANGE")
        room = request.max_bytes if request.HasField("max_bytes") else DEFAULT_CLAIM_BYTES
        if room < 1:
            raise invalid_argument("max_bytes", "max_bytes must be above 0", value=room, reason="OUT_OF_RANGE")
        room = min(room, self.max_message_bytes)
        asked = duration_seconds(request.max_wait, "max_wait")
        deadline = deadline_after(self.desk.clock, wait_budget(asked, context.time_remaining()))

        record = st.Record(claim=st.Claim(partition=partition.name, worker_id=request.worker_id))

        async def execute() -> tuple[str, ...]:
            claims = await self._claim(run, partition, record, limit, room, deadline)
            if not claims:
                raise _NoWork
            # Kept are ids: a claim would keep its group, results and all, for as long as the answer.
            return tuple(claim.token.claim_id for claim in claims)

        try:
            if request.request_id:
                require_id("request_id", request.request_id)
                record.request_id, record.fingerprint = request.request_id, self.content(request)
                claim_ids = await self.desk.memory.answers["ClaimGroups"].once(
                    request.run_id,
                    "ClaimGroups",
                    request.request_id,
                    record.fingerprint,
                    self.desk.clock.now(),
                    execute,
                )
            else:
                claim_ids = await execute()
        except _NoWork:
            claim_ids = ()
        await self.desk.durable()
        claims = [claim for claim_id in claim_ids if (claim := run.state.claims.get(claim_id)) is not None]
        return pb.ClaimGroupsResponse(claims=self._living(run, claims, await self._prompts(claims)))

    async def _claim(
        self, run: Run, partition: Partition, record: st.Record, limit: int, room: int, deadline: float
    ) -> list[Claim]:
        """Claim at once, or park until there is work or the deadline has come."""
        self.draining.check()
        claims = self._take(run, partition, record, limit, room)
        if claims:
            self.desk.changed(run, partition)
        if claims or deadline <= self.desk.clock.now():
            return claims
        try:
            with self.desk.parking(run).claim(partition) as parked:
                while await park(parked.wake, deadline, clock=self.desk.clock, draining=self.draining):
                    parked.check()
                    parked.wake.clear()
                    claims = self._take(run, partition, record, limit, room)
                    if claims:
                        return claims
            return []
        finally:
            # Only the first in the queue is woken: now that this one has left it, it is another's turn.
            self.desk.changed(run, partition)

    def _take(self, run: Run, partition: Partition, record: st.Record, limit: int, room: int) -> list[Claim]:
        """Claim what fits into the answer; one claim always does. `record` tells who claims and takes down what."""
        claims: list[Claim] = []
        at = self.desk.moment()
        while limit > 0 and len(claims) < MAX_CLAIMS and (group := work.next_group(partition)) is not None:
            room -= claim_size(group, limit)
            if claims and room < 0:
                break
            claim = work.claim(partition, group, record.claim.worker_id, limit, at)
            record.claim.takes.add(group_id=group.group_id, limit=limit)
            limit -= len(claim.open)
            claims.append(claim)
        if claims:
            self.desk.record(run, record, at)
        return claims

    async def _prompts(self, claims: list[Claim]) -> dict[str, bytes]:
        """The inline prompts of the claims by payload id, those left out that are gone or cannot be read."""
        prompts: dict[str, bytes] = {}
        for claim in claims:
            prompt = claim.group.prompt
            if prompt is None or not prompt.inline or prompt.id in prompts:
                continue
            try:
                data = await self.store.read(prompt.id, 0, prompt.size) if prompt.size else b""
            except TurnoutError as error:
                if error.code is not Code.NOT_FOUND:
                    _log.error("prompt is lost", group_id=claim.group.group_id, reason=error.reason, **error.metadata)
                continue
            prompts[prompt.id] = data
        return prompts

    def _living(self, run: Run, claims: list[Claim], prompts: dict[str, bytes]) -> list[pb.Claim]:
        """The claims as messages; of a repeated answer, those that still live.

        A claim whose prompt cannot be read is not told either: it expires, and so the group fails in the end.
        """
        now = self.desk.clock.now()
        messages: list[pb.Claim] = []
        for claim in claims:
            until = run.state.claims.until(claim.token.claim_id)
            prompt = claim.group.prompt
            readable = prompt is None or not prompt.inline or prompt.id in prompts
            if until is not None and readable:
                messages.append(claim_to(claim, self.wall(until - now), lambda payload: prompts[payload.id]))
        return messages

    async def SetIntake(self, request: pb.SetIntakeRequest, context: Context) -> pb.SetIntakeResponse:
        """Pause or resume the intake of a partition."""
        run, partition = self.place(request.run_id, request.partition)
        run.check_epoch(optional_epoch(request))
        if not request.HasField("paused"):
            raise invalid_argument("paused", "paused is required", reason="REQUIRED")

        def execute(record: st.Record) -> pb.SetIntakeResponse:
            answer = commands.set_intake(run, request)
            if answer.was_paused != request.paused or record.request_id:
                record.set_intake = request.SerializeToString()
                self.desk.record(run, record, self.desk.moment())
            self.desk.contact(run)
            self.desk.changed(run, partition)
            return answer

        return await self.once(request.run_id, "SetIntake", request, request.request_id, execute)

    async def RenewClaims(self, request: pb.RenewClaimsRequest, context: Context) -> pb.RenewClaimsResponse:
        """Extend the leases of claims."""
        run = self.run(request.run_id)
        check_items("tokens", len(request.tokens), MAX_ITEMS_PER_CALL)
        at = self.desk.moment()
        outcomes = each(request.tokens, lambda token: run.renew_claim(token_from(token), at))
        await self.desk.durable()
        return pb.RenewClaimsResponse(outcomes=outcomes)

    async def DeclineRefill(self, request: pb.DeclineRefillRequest, context: Context) -> pb.DeclineRefillResponse:
        """Cancel the credits of a refill claim and end supply."""
        run, partition = self.place(request.run_id, request.partition)
        run.check_epoch(optional_epoch(request))
        require_id("refill_claim_id", request.refill_claim_id)
        answer = commands.decline_refill(run, request)
        if answer.cancelled:
            self.desk.record(run, st.Record(decline_refill=request.SerializeToString()), self.desk.moment())
        self.desk.contact(run)
        self.desk.changed(run, partition)
        await self.desk.durable()
        return answer

    async def EvictGroups(self, request: pb.EvictGroupsRequest, context: Context) -> pb.EvictGroupsResponse:
        """Remove groups on the caller's order."""
        run = self.run(request.run_id)
        check_items("group_ids", len(request.group_ids), MAX_GROUPS_PER_CALL)
        partition = run.partitions.get(require_id("partition", request.partition))
        run.check_epoch(optional_epoch(request))

        def execute(record: st.Record) -> pb.EvictGroupsResponse:
            at = self.desk.moment()
            answer = commands.evict_groups(run, request, at)
            if answer.evicted or record.request_id:
                record.evict_groups = request.SerializeToString()
                self.desk.record(run, record, at)
            self.desk.contact(run)
            if partition is not None:
                self.desk.changed(run, partition)
            return answer

        return await self.once(request.run_id, "EvictGroups", request, request.request_id, execute)
