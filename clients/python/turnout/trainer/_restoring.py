"""Bringing weights to standalone replicas that came back without them, while the trainer waits for groups.

Invariants: only a trainer that waits is asked, never one that computes; the version is the one brought to standalone
replicas last, so that what serves agrees; a replica that does not take it is tried again later, as is a controller that
does not answer, and ends no wait.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from typing import Final, cast

from turnout.client import (
    AsyncEngineClient,
    EngineClient,
    FailedPrecondition,
    NotFound,
    RetryPolicy,
    StaleEpoch,
    TurnoutError,
    Unimplemented,
)
from turnout.client._calls import BlockingMessages
from turnout.client._retry import Backoff
from turnout.engine.v1 import engine_pb2
from turnout.trainer._weights import COSTS_ONLY_SPEED, UpdateWeights, WeightUpdates

_log = logging.getLogger("turnout")

PATIENCE_S: Final = 0.5
"""A wait that is over sooner is none that weights should be moved in."""

_TRIES: Final = RetryPolicy(initial=1.0, maximum=30.0)
"""Pauses after replicas that did not take the weights."""

_AGAIN_S: Final = 5.0
"""Until replicas are asked for or followed again after the controller was away for long."""

_ASK_S: Final = 5.0
"""For the controller to tell of its replicas: meanwhile nobody sees that groups have come."""

_STANDALONE: Final = engine_pb2.REPLICA_ROLE_STANDALONE


def lacking(replicas: Iterable[engine_pb2.Replica], version: int) -> list[str]:
    """Standalone replicas that could serve `version` and do not have it, by id."""
    return sorted(
        one.spec.replica_id
        for one in replicas
        if one.spec.role == _STANDALONE
        and one.health == engine_pb2.REPLICA_HEALTH_HEALTHY
        and not one.update_id
        and not (one.HasField("weight_version") and one.weight_version == version)
    )


def serving(replicas: Iterable[engine_pb2.Replica]) -> bool:
    """Whether any replica takes requests, or will by itself."""
    return any(one.route in (engine_pb2.ROUTE_STATE_SERVING, engine_pb2.ROUTE_STATE_HELD) for one in replicas)


class ReplicaWatch:
    """Follows the replicas of a run in a thread of its own until some want weights, then cuts the wait.

    It lasts as long as one wait: a call at work all the time would harm whoever forks while it trains.
    """

    def __init__(
        self, client: EngineClient, run_id: str, wants: Callable[[Iterable[engine_pb2.Replica]], object]
    ) -> None:
        self._client = client
        self._request = engine_pb2.WatchReplicasRequest(run_id=run_id)
        self._wants = wants
        self._stop = threading.Event()
        self._messages: BlockingMessages | None = None
        self._thread = threading.Thread(target=self._run, name=f"turnout-replicas-{run_id}", daemon=True)
        self._cut: Callable[[], None]

    def start(self, cut: Callable[[], None]) -> None:
        """Begin; `cut` is called once, from the thread."""
        self._cut = cut
        self._thread.start()

    def stop(self) -> None:
        """End the thread. `cut` is not called any more."""
        self._stop.set()
        if self._messages is not None:
            self._messages.cancel()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                if self._follow():
                    self._cut()
                    return
            except Unimplemented:
                return
            except TurnoutError as error:
                _log.debug("replicas are not followed: %s", error)
            pause = _AGAIN_S

    def _follow(self) -> bool:
        """Whether some want weights; False if the stream ended before."""
        replicas: dict[str, engine_pb2.Replica] = {}
        # The type of a stub's stream has no `cancel`.
        messages = self._messages = cast(BlockingMessages, self._client.calls.WatchReplicas(self._request))
        if self._stop.is_set():
            messages.cancel()
        try:
            for message in messages:
                for replica in message.changed:
                    replicas[replica.spec.replica_id] = replica
                for replica_id in message.removed:
                    replicas.pop(replica_id, None)
                if self._wants(replicas.values()):
                    return True
        finally:
            messages.cancel()
        return False


class Restoring:
    """What one trainer does about replicas without weights."""

    def __init__(
        self,
        engine: AsyncEngineClient,
        weights: WeightUpdates,
        client: EngineClient,
        *,
        run_id: str,
        allow_older: bool,
    ) -> None:
        """`client` is for a thread of its own, and is closed with `close`."""
        self._engine = engine
        self._weights = weights
        self._client = client
        self._run_id = run_id
        self._allow_older = allow_older
        self._backoff = Backoff(_TRIES, random.Random())
        self._not_before = 0.0
        self.restored = 0
        """How often a replica got weights in this way."""

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def during(self, update: UpdateWeights, version: int, *, unless_served: bool) -> RestoringWait:
        """What to do in one wait. `unless_served`: only while nothing serves at all."""
        return RestoringWait(self, update, version, unless_served=unless_served)

    async def attend(self, wait: RestoringWait) -> float | None:
        """Bring weights to who lacks them; the seconds until the next try, None if none is due."""
        request = engine_pb2.ListReplicasRequest(run_id=self._run_id)
        try:
            names = wait.wants((await self._engine.calls.ListReplicas(request, timeout=_ASK_S)).replicas)
        except TurnoutError as error:
            # The wait is for the buffer, which may have what it takes.
            _log.warning("replicas are not looked after while the trainer waits: %s", error)
            return _AGAIN_S
        left = self._not_before - self._engine.link.now()
        if not names or left > 0:
            return left if names else None
        _log.warning("replicas %s came back without weights, and get version %d again", ", ".join(names), wait.version)
        if await self._install(wait, names) and wait.given.isdisjoint(names):
            wait.given.update(names)
            self._backoff.reset()
            return None
        pause = self._backoff.next()
        self._not_before = self._engine.link.now() + pause
        return pause

    async def _install(self, wait: RestoringWait, names: list[str]) -> bool:
        try:
            installed = await self._weights.install(
                wait.update,
                role=_STANDALONE,
                replica_ids=names,
                version=wait.version,
                allow_older=self._allow_older,
                restoring=True,
            )
        except StaleEpoch:
            raise
        except (*COSTS_ONLY_SPEED, FailedPrecondition, NotFound) as error:
            _log.warning("replicas %s did not take version %d: %s", ", ".join(names), wait.version, error)
            return False
        self.restored += len(names) - len(installed.failed)
        return not installed.failed

    def watch(self, wait: RestoringWait) -> ReplicaWatch:
        """What cuts the wait when replicas want weights."""
        return ReplicaWatch(self._client, self._run_id, wait.wants)


class RestoringWait:
    """One wait of the trainer, as `turnout.client._waits.Meanwhile`."""

    def __init__(self, restoring: Restoring, update: UpdateWeights, version: int, *, unless_served: bool) -> None:
        self._restoring = restoring
        self._unless_served = unless_served
        self._waited = False
        self._watch: ReplicaWatch | None = None
        self.update = update
        self.version = version
        self.given: set[str] = set()
        """Replicas that took the version in this wait. One that lacks it again dies of it, or tells of another."""

    def wants(self, replicas: Iterable[engine_pb2.Replica]) -> list[str]:
        """The replicas that are to get weights now."""
        everyone = list(replicas)
        if self._unless_served and serving(everyone):
            return []
        return lacking(everyone, self.version)

    async def attend(self) -> float | None:
        """Nothing at first: the groups may be there."""
        if not self._waited:
            self._waited = True
            return PATIENCE_S
        again = await self._restoring.attend(self)
        # Who is asked again soon needs nobody who cuts the wait.
        self._watch = self._restoring.watch(self) if again is None else None
        return again

    def listen(self, cut: Callable[[], None] | None) -> None:
        """See Meanwhile."""
        if self._watch is None:
            return
        if cut is not None:
            self._watch.start(cut)
        else:
            self._watch.stop()
            self._watch = None
