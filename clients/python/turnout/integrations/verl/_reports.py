"""What an agent loop worker tells the buffer about one prompt group.

Invariants: a group ends in the buffer only after it has ended in TransferQueue, so that nobody samples what its worker
still writes: the session that settles last is held back until then. A report that cannot be made is logged and never
fails the rollout; the trainer finds the group by its tags.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, TurnoutError, item_error

_log = logging.getLogger("turnout")


class GroupReport:
    """The reports of one group."""

    def __init__(
        self,
        buffer: AsyncBufferClient,
        place: Mapping[str, Any],
        token: buffer_pb2.ClaimToken,
        uid: str,
        sessions: int,
    ) -> None:
        """`place`: run_id and partition."""
        self._buffer = buffer
        self._place = place
        self._token = token
        self._uid = uid
        self._left = sessions
        self._held: dict[int, list[buffer_pb2.Output]] = {}
        self._whole = True
        self._failed = ""

    async def finished(self, session: int, outputs: list[buffer_pb2.Output]) -> None:
        """A session has put its outputs into TransferQueue."""
        self._left -= 1
        if not outputs:
            self._whole = False
        elif self._left and not self._failed:
            await self._finish({session: outputs})
        else:
            self._held[session] = outputs

    def failed(self, error: BaseException) -> None:
        """A session has failed, and with it the group."""
        self._left -= 1
        self._failed = f"{type(error).__name__}: {error}"[:1000] or "failed"

    async def close(self) -> None:
        """The group has ended in TransferQueue."""
        if not self._failed and self._left == 0:
            if self._held:
                await self._finish(self._held)
            if self._whole:
                return
            if await self._call("FinishGroup", buffer_pb2.FinishGroupRequest(**self._place, group_id=self._uid)):
                return
        error = self._failed or "no session has an output"
        await self._call("FailGroup", buffer_pb2.FailGroupRequest(**self._place, group_id=self._uid, error=error))

    async def _finish(self, outputs: Mapping[int, list[buffer_pb2.Output]]) -> None:
        results = [
            buffer_pb2.TrajectoryResult(token=self._token, group_id=self._uid, index=session, outputs=made)
            for session, made in outputs.items()
        ]
        answer = await self._call(
            "FinishTrajectories", buffer_pb2.FinishTrajectoriesRequest(**self._place, results=results)
        )
        for outcome in answer.outcomes if answer else ():
            error = item_error(outcome)
            if error is not None:
                # Such as a reward that the group filter needs and that nobody computed.
                self._failed = f"{error.reason}: {error}"[:1000]
                _log.error("group %s: the buffer refused a result: %s", self._uid, error)

    async def _call(self, name: str, request: Any) -> Any:
        """The answer, None if there is none."""
        try:
            return await getattr(self._buffer.calls, name)(request)
        except TurnoutError as error:
            if error.reason != "NOTHING_FINISHED":
                _log.warning("group %s was not reported: %s", self._uid, error)
            return None
