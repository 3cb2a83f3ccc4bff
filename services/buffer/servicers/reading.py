"""Calls that only read: depth, groups, ledger, and the streams that follow them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf

from services.buffer.domain.depth import Depth
from services.buffer.domain.dropped import CAPACITY
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.group import GroupState
from services.buffer.domain.run import Run, check_step
from services.buffer.domain.trajectory import TrajectoryState
from services.buffer.servicers.base import BufferCalls, Context
from services.buffer.wire.groups import event_to, group_to
from services.buffer.wire.scalars import enum_of
from services.buffer.wire.waits import depth_to, dropped_to, ledger_to
from services.runtime.errors import invalid_argument, out_of_range, require_id
from services.runtime.waits import MAX_WAIT_S, deadline_after, duration_seconds, park
from turnout.buffer.v1 import buffer_pb2 as pb

MAX_PAGE = 1000
DEFAULT_PAGE = 100
# A page ends early at this size, below the 4 MiB that many clients accept.
PAGE_BYTES = 3 << 20
# Events per message: some 100 kB.
EVENTS_PER_MESSAGE = 1000
# Domain seconds from one message of progress to the next: hundreds of workers report by themselves.
PROGRESS_S = 2.0


class ReadingCalls(BufferCalls):
    """GetSampleableCount, WatchDepth, WatchGroups, GetGroup, ListGroups, GetLedger."""

    async def GetSampleableCount(
        self, request: pb.GetSampleableCountRequest, context: Context
    ) -> pb.GetSampleableCountResponse:
        """Read the depth."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        step = request.step if request.HasField("step") else run.state.step
        check_step(step)
        response = pb.GetSampleableCountResponse(depth=depth_to(partition.depth(step, self.desk.clock.now())))
        await self.desk.durable()
        return response

    async def WatchDepth(self, request: pb.WatchDepthRequest, context: Context) -> AsyncIterator[pb.WatchDepthResponse]:
        """Stream the depth after every change that the reader keeps up with."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        if request.HasField("step"):
            check_step(request.step)
        interval = duration_seconds(request.min_interval, "min_interval")
        clock = self.desk.clock
        told: Depth | None = None
        with self.desk.parking(run).depth_watch(partition) as parked:
            while True:
                parked.wake.clear()
                step = request.step if request.HasField("step") else run.state.step
                depth = partition.depth(step, clock.now())
                # Time alone is no change.
                timeless = replace(depth, oldest_running_for=0.0)
                if timeless != told:
                    told = timeless
                    await self.desk.durable()
                    yield pb.WatchDepthResponse(depth=depth_to(depth))
                    if interval:
                        await self.draining.race(clock.sleep(interval))
                forever = deadline_after(clock, MAX_WAIT_S)
                await park(parked.wake, forever, clock=clock, draining=self.draining)
                parked.check()

    async def WatchGroups(
        self, request: pb.WatchGroupsRequest, context: Context
    ) -> AsyncIterator[pb.WatchGroupsResponse]:
        """Replay what is kept of the group events, then follow."""
        run = self.run(request.run_id)
        self.asked(run)
        events = run.state.events
        sequence = request.from_sequence if request.HasField("from_sequence") else events.next_sequence
        if sequence < 0:
            message = "from_sequence must not be negative"
            raise invalid_argument("from_sequence", message, value=sequence, reason="OUT_OF_RANGE")
        if sequence > events.next_sequence:
            message = f"the next event is {events.next_sequence}: these numbers are of another life of the run"
            raise out_of_range(
                "EVENTS_AHEAD", message, field="from_sequence", value=sequence, next_sequence=events.next_sequence
            )
        # Numbers begin at 1, so 0 asks for everything.
        sequence = max(sequence, 1)
        clock = self.desk.clock
        told_at = -inf
        with self.desk.parking(run).group_watch() as parked:
            while True:
                parked.wake.clear()
                while batch := events.read(sequence, EVENTS_PER_MESSAGE):
                    sequence += len(batch)
                    await self.desk.durable()
                    yield pb.WatchGroupsResponse(events=map(event_to, batch))
                if parked.progress and clock.now() >= told_at + PROGRESS_S:
                    told_at = clock.now()
                    progress = [event for event in parked.progress.values() if _runs(run, event)]
                    parked.progress.clear()
                    if progress:
                        yield pb.WatchGroupsResponse(events=map(event_to, progress))
                    continue
                until = told_at + PROGRESS_S if parked.progress else deadline_after(clock, MAX_WAIT_S)
                await park(parked.wake, until, clock=clock, draining=self.draining)
                parked.check()

    async def GetGroup(self, request: pb.GetGroupRequest, context: Context) -> pb.GetGroupResponse:
        """Read one group."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        group = partition.require(require_id("group_id", request.group_id))
        response = pb.GetGroupResponse(group=group_to(partition, group))
        await self.desk.durable()
        return response

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        """Page through the groups in order of arrival."""
        run, partition = self.place(request.run_id, request.partition)
        self.asked(run)
        limit = request.page_size if request.HasField("page_size") else DEFAULT_PAGE
        if not 1 <= limit <= MAX_PAGE:
            message = f"page_size must be 1 to {MAX_PAGE}, it is {limit}"
            raise invalid_argument("page_size", message, value=limit, reason="OUT_OF_RANGE")
        states = {
            enum_of(GroupState, number, f"states[{position}]", GroupState.PENDING)
            for position, number in enumerate(request.states)
        }
        groups, following = partition.arrivals.page(_page_after(request.page_token), limit, states)
        messages: list[pb.Group] = []
        size = 0
        for group in groups:
            shown = group_to(partition, group)
            size += shown.ByteSize()
            if messages and size > PAGE_BYTES:
                following = messages[-1].sequence
                break
            messages.append(shown)
        response = pb.ListGroupsResponse(
            groups=messages,
            next_page_token="" if following is None else str(following),
            event_sequence=run.state.events.next_sequence - 1,
        )
        await self.desk.durable()
        return response

    async def GetLedger(self, request: pb.GetLedgerRequest, context: Context) -> pb.GetLedgerResponse:
        """Account for every group ever added."""
        run = self.run(request.run_id)
        self.asked(run)
        limit = request.max_dropped_prompts
        if not 0 <= limit <= CAPACITY:
            message = f"max_dropped_prompts must be 0 to {CAPACITY}, it is {limit}"
            raise invalid_argument("max_dropped_prompts", message, value=limit, reason="OUT_OF_RANGE")
        response = ledger_to(run.partition(request.partition).ledger() if request.partition else run.ledger())
        dropped = [
            (prompt, name)
            for name, partition in run.partitions.items()
            if limit and name == (request.partition or name)
            for prompt in partition.dropped.worst(limit)
        ]
        dropped.sort(key=lambda found: (-found[0].least, -found[0].dropped))
        response.dropped_prompts.extend([dropped_to(name, prompt) for prompt, name in dropped[:limit]])
        await self.desk.durable()
        return response


def _runs(run: Run, progress: GroupEvent) -> bool:
    """Whether the trajectory still runs in the attempt that its worker told of."""
    group = run.partition(progress.partition).groups.get(progress.group_id)
    if group is None or progress.index is None:
        return False
    trajectory = group.trajectory(progress.index)
    return trajectory.state is TrajectoryState.RUNNING and trajectory.attempt == progress.attempt


def _page_after(token: str) -> int:
    """The sequence number a page begins after."""
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 20):
        raise invalid_argument("page_token", "page_token is not one of ours", value=token, reason="BAD_PAGE_TOKEN")
    return int(token)
