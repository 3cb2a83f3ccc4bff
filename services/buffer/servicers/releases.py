"""Calls of those who own external payload stores."""

from collections.abc import AsyncIterator
from contextlib import nullcontext

from services.buffer.servicers.base import BufferCalls, Context
from services.buffer.wire.outputs import ref_to
from services.runtime.errors import invalid_argument, require_id, unavailable
from services.runtime.waits import MAX_WAIT_S, Wake, deadline_after, park
from turnout.buffer.v1 import buffer_pb2 as pb

# Some 100 kB.
REFS_PER_MESSAGE = 1000
MAX_ACKNOWLEDGED = 100_000


class ReleaseCalls(BufferCalls):
    """WatchReleases, AckReleases."""

    async def WatchReleases(
        self, request: pb.WatchReleasesRequest, context: Context
    ) -> AsyncIterator[pb.WatchReleasesResponse]:
        """Send what was let go in a store and not acknowledged, then follow."""
        run_id = require_id("run_id", request.run_id)
        store = require_id("store", request.store)
        self.desk.check()
        book = self.desk.memory.externals.get(run_id)
        if book is None:
            book = self.run(run_id).state.payloads.external
        run = self.desk.runs.get(run_id)
        clock = self.desk.clock
        wake = Wake()
        seen = given_up = 0
        book.listeners.add(wake.set)
        try:
            with nullcontext() if run is None else self.desk.parking(run).slot():
                while True:
                    wake.clear()
                    refs, seen = book.waiting(store, seen, REFS_PER_MESSAGE)
                    if refs or book.given_up != given_up:
                        given_up = book.given_up
                        await self.desk.durable()
                        yield pb.WatchReleasesResponse(refs=map(ref_to, refs), given_up=given_up)
                        continue
                    self.desk.check()
                    if self.desk.memory.externals.get(run_id) is not book:
                        if self.desk.runs.get(run_id) is not None:
                            raise unavailable("RELOADING", "what is stored was read again; the call may be repeated")
                        return
                    await park(wake, deadline_after(clock, MAX_WAIT_S), clock=clock, draining=self.draining)
        finally:
            book.listeners.discard(wake.set)

    async def AckReleases(self, request: pb.AckReleasesRequest, context: Context) -> pb.AckReleasesResponse:
        """Send these no more."""
        run_id = require_id("run_id", request.run_id)
        store = require_id("store", request.store)
        if len(request.ids) > MAX_ACKNOWLEDGED:
            message = f"one call acknowledges at most {MAX_ACKNOWLEDGED} references"
            raise invalid_argument("ids", message, value=len(request.ids), reason="TOO_MANY_IDS")
        self.desk.check()
        acknowledged = self.desk.acknowledge(run_id, store, request.ids)
        await self.desk.durable()
        return pb.AckReleasesResponse(acknowledged=acknowledged)
