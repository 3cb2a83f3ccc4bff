"""Bringing weights to the engines when the scheduler lends, or when it does not.

Invariants: a lend that began is completed or abandoned, whatever the weight callback does; engines that fail during a
lend cost speed and not the training, but only once the trainer is sure to have its GPUs; the time of each standalone
update is told to the scheduler once, in domain seconds.
"""

from __future__ import annotations

import logging

from turnout.client import AsyncSchedulerClient, TurnoutError, duration
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer._setup import TrainerSetup
from turnout.trainer._weights import COSTS_ONLY_SPEED, Installed, UpdateWeights, WeightUpdates

_log = logging.getLogger("turnout")


class Lending:
    """Fulfils the lends of one run."""

    def __init__(
        self,
        setup: TrainerSetup,
        scheduler: AsyncSchedulerClient,
        weights: WeightUpdates,
        *,
        epoch: int,
        time_scale: float,
    ) -> None:
        self._setup = setup
        self._scheduler = scheduler
        self._weights = weights
        self._epoch = epoch
        self._time_scale = time_scale
        self.open: scheduler_pb2.Lend | None = None
        """The lend that was neither completed nor abandoned, if there is one: the run goes on once it is."""
        self.mode: events_pb2.Mode.ValueType = events_pb2.MODE_UNSPECIFIED
        """Who has the hybrid GPUs, as the scheduler said last."""
        self.untold: Installed | None = None
        """The last standalone update, until the scheduler was told."""
        self.served: int | None = None
        """Version that standalone replicas are to have; None before the first, and after an update that failed."""

    async def update_standalone(
        self, update: UpdateWeights, version: int, *, allow_older: bool, lending: bool = False
    ) -> dict[str, float]:
        """Bring `version` to the standalone replicas, if there are any.

        While none answers it waits for one, at most as long as for a service that is away. `lending`: it does not
        wait, since hybrids are about to serve, and they get the version when the trainer waits for groups.
        """
        if self._setup.config.standalone_gpus == 0:
            return {}
        patience = None if lending else self._setup.options.timeouts.outage
        # Who goes on after a failure must not bring the weights it has under the version before.
        self.served = None
        installed = await self._weights.install_standalone(
            update, version=version, allow_older=allow_older, patience=patience
        )
        self.served = version
        if installed is None:
            return {"turnout/weights/standalone_away": 1.0}
        self.untold = installed
        return {"timing_s/update_weights": installed.seconds / self._time_scale, **_cost_metrics(installed)}

    async def fulfil(self, lend: scheduler_pb2.Lend, update: UpdateWeights) -> dict[str, float]:
        """Bring weights to the replicas of a lend and complete it. Raises what the callback raises."""
        metrics: dict[str, float] = {}
        self.open = lend
        try:
            if lend.update_standalone:
                metrics |= await self.update_standalone(
                    update, lend.weight_version, allow_older=lend.allow_older, lending=True
                )
        except BaseException as error:
            await self._abandon(lend, error)
            raise
        try:
            response = await self._complete(lend, update)
        except BaseException as error:
            abandoned = await self._abandon(lend, error)
            # A lend that was abandoned before, perhaps by a scheduler that went on with that after a crash, is over.
            over = isinstance(error, TurnoutError) and error.reason == "LEND_CLOSED"
            if not (abandoned and (over or isinstance(error, COSTS_ONLY_SPEED))):
                raise
            _log.warning("lend %s was abandoned: %s", lend.lend_id, error)
            return {**metrics, "turnout/lend_abandoned": 1.0}
        self.open = self.untold = None
        self.mode = response.mode
        if response.failed_replica_ids:
            _log.warning("lent without %s", ", ".join(response.failed_replica_ids))
        return {**metrics, **response.metrics}

    async def _complete(self, lend: scheduler_pb2.Lend, update: UpdateWeights) -> scheduler_pb2.CompleteLendResponse:
        installed = await self._weights.install(
            update,
            role=engine_pb2.REPLICA_ROLE_HYBRID,
            replica_ids=lend.replica_ids,
            version=lend.weight_version,
            allow_older=lend.allow_older,
        )
        request = scheduler_pb2.CompleteLendRequest(
            run_id=self._setup.run_id,
            epoch=self._epoch,
            lend_id=lend.lend_id,
            hybrid_update=duration(installed.seconds / self._time_scale),
            hybrid_cost=_cost(installed),
        )
        self.tell_standalone(request)
        return await self._scheduler.calls.CompleteLend(request)

    def tell_standalone(self, request: scheduler_pb2.BeginStepRequest | scheduler_pb2.CompleteLendRequest) -> None:
        """Add the last standalone update to a call, if the scheduler has not been told of it."""
        if self.untold is not None:
            request.standalone_update.CopyFrom(duration(self.untold.seconds / self._time_scale))
            request.standalone_cost.CopyFrom(_cost(self.untold))

    async def _abandon(self, lend: scheduler_pb2.Lend, error: BaseException) -> bool:
        reason = f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace").decode()
        request = scheduler_pb2.AbandonLendRequest(
            run_id=self._setup.run_id, epoch=self._epoch, lend_id=lend.lend_id, reason=reason
        )
        try:
            self.mode = (await self._scheduler.calls.AbandonLend(request)).mode
        except TurnoutError as failure:
            # The first error is the one the trainer has to see.
            _log.warning("lend %s was not abandoned: %s", lend.lend_id, failure)
            return False
        self.open = None
        return True


def _cost(installed: Installed) -> scheduler_pb2.UpdateCost:
    return scheduler_pb2.UpdateCost(
        tokens_recomputed=installed.tokens_recomputed, blackout=duration(installed.blackout_seconds)
    )


def _cost_metrics(installed: Installed) -> dict[str, float]:
    return {
        "turnout/weights/tokens_recomputed": float(installed.tokens_recomputed),
        "turnout/weights/blackout_s": installed.blackout_seconds,
    }
