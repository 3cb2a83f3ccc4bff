"""Moving weights by verl's means, and nothing else: memory and requests of the replicas are the controller's.

Invariants: verl's managers stop, release, wake and resume nothing; its actor workers, which wake the engine on their
own GPUs before and after they send, leave that to the controller, so that nothing happens twice and KV memory comes
back only after the trainer has left the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Self

from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.ray_utils import auto_await


class WeightMover(CheckpointEngineManager):
    """verl's manager, reduced to the weights."""

    replicas: list[Any]
    _sleep: Callable[[], None]

    @classmethod
    def instead_of(cls, manager: CheckpointEngineManager, sleep: Callable[[], None]) -> Self:
        """In place of one that verl made. `sleep` is called when verl asks all replicas to sleep."""
        mover = cls(manager.config, manager.actor_wg, manager.replicas)
        mover._sleep = sleep
        return mover

    def move(self, ranks: Collection[int], global_steps: int) -> dict[str, Any]:
        """Send the weights to the replicas of these ranks; what verl's engine tells about it."""
        everyone = self.replicas
        self.replicas = [replica for replica in everyone if replica.replica_rank in ranks]
        try:
            return dict(self.update_weights(global_steps) or {})
        finally:
            self.replicas = everyone

    def sleep_replicas(self) -> None:
        """Let the controller put them to sleep."""
        self._sleep()

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """The controller has paused them."""

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """The controller has released their KV memory."""

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """The controller refills it at the commit."""

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """The controller resumes them."""


class ActorWorker(DetachActorWorker):
    """verl's actor worker, which sends weights to the engine on its own GPUs without waking it."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """As verl's; memory is woken by the controller before, and after the trainer has left the device."""
        self.rollout.resume = _left_to_the_controller
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            del self.rollout.resume


async def _left_to_the_controller(tags: list[str]) -> None:
    """In place of the rollout's own `resume`."""
