"""Hooks that mirror the life of a trainer, for asyncio.

    hooks = await AsyncTrainerHooks.open(TrainerSetup(...))
    await hooks.on_init_end()                       # weights reach the engines, all GPUs generate
    await hooks.on_train_begin(prompts(hooks.warmup_groups))
    for step in range(hooks.next_step, last + 1):
        await hooks.on_step_begin(step)             # takes the GPUs back if enough groups are ready
        await hooks.add_groups(step, prompts(batch))
        await hooks.prepare_step(step)              # else waits until enough are, and takes them back
        for mini_batch in range(mini_batches):
            await hooks.on_sample_begin(step, mini_batch)
            batch = await hooks.sample(step, mini_batch, size)
            await hooks.on_sample_end(step, mini_batch)
            train(batch); await batch.commit()
        await hooks.on_step_end(step)               # decides, moves weights, lends
    await hooks.close(reason="finished")

Invariants: every call carries the epoch that OpenRun granted; durations are measured on one monotonic clock and
reported in domain seconds; the eviction cursor goes through all waits, so each eviction is reported once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AsyncBufferClient,
    AsyncEngineClient,
    AsyncSchedulerClient,
    EngineClient,
    PaysRefills,
    duration,
)
from turnout.client._payloads import Bytes
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.stores import StoreOwner, Stores
from turnout.tracing import StepSpan
from turnout.trainer._batch import AsyncBatch
from turnout.trainer._heartbeat import Heartbeat
from turnout.trainer._lending import Lending
from turnout.trainer._restoring import Restoring, RestoringWait
from turnout.trainer._setup import TrainerSetup
from turnout.trainer._weights import UpdateWeights, WeightTarget, WeightUpdates

_log = logging.getLogger("turnout")


class NotReached(Exception):
    """A wait for a mini-batch ended without it: supply has ended, or max_wait passed."""

    def __init__(self, done: buffer_pb2.SampleDone) -> None:
        name = buffer_pb2.WaitOutcome.Name(done.outcome).removeprefix("WAIT_OUTCOME_")
        super().__init__(f"{name}: {done.reason}")
        self.outcome = done.outcome
        """TIMED_OUT, EXHAUSTED or HELD."""
        self.depth = done.depth
        """The depth at the end; fewer groups may still be sampled."""


def resume_from(manifest: str, step: int) -> scheduler_pb2.Resume:
    """Return where to go on from what `save` returned for `step`."""
    return scheduler_pb2.Resume(resume_step=step, checkpoint_id=json.loads(manifest)["checkpoint_id"])


class AsyncTrainerHooks:
    """The hooks of one trainer; make it with `open`."""

    def __init__(
        self,
        setup: TrainerSetup,
        buffer: AsyncBufferClient,
        engine: AsyncEngineClient,
        scheduler: AsyncSchedulerClient,
        stores: Stores,
        opened: scheduler_pb2.OpenRunResponse,
    ) -> None:
        self.setup = setup
        self.buffer = buffer
        self.engine = engine
        self.scheduler = scheduler
        self.epoch: int = opened.epoch
        """Fencing token of this trainer."""
        self.next_step: int = opened.next_step
        """Step that comes first."""
        self.warmup_groups: int = opened.warmup_groups
        """Prompts to add before it."""
        self.time_scale: float = opened.time_scale or 1.0
        """Wall seconds per domain second: 1 except in demos and tests."""
        self._allow_older = opened.allow_older
        self.cursor: int = opened.cursor
        """Eviction cursor of the trainer. Who also waits by other means shares it, so that nothing is told twice."""
        self._sample_began: float | None = None
        self._span = StepSpan()
        self._next_attempt: dict[tuple[int, int], int] = {}
        """Where BeginSample goes on for the mini-batch, by step and number, that GPUs were last lent within."""
        self._releases: dict[tuple[int, int], int] = {}
        self._refills: PaysRefills = setup.refills or buffer.refills(
            setup.refill_fn, run_id=setup.run_id, partition=setup.partition, epoch=self.epoch
        )
        self._weights = WeightUpdates(
            engine, run_id=setup.run_id, epoch=self.epoch, staggered=setup.staggered, in_flight=setup.in_flight
        )
        self._lending = Lending(setup, scheduler, self._weights, epoch=self.epoch, time_scale=self.time_scale)
        self._lending.mode = opened.run.mode
        self._lending.open = opened.lend if opened.HasField("lend") else None
        self._restoring = Restoring(
            engine,
            self._weights,
            EngineClient(setup.engine, setup.options),
            run_id=setup.run_id,
            allow_older=self._allow_older,
        )
        self._update_weights: UpdateWeights | None = setup.update_weights
        """The callback that moved weights last."""
        self._stores = stores
        self._owners = [StoreOwner(setup.buffer, setup.run_id, store, setup.options) for store in stores]
        for owner in self._owners:
            owner.start()
        self._heartbeat = Heartbeat(setup.scheduler, setup.options, run_id=setup.run_id, epoch=self.epoch)
        self._heartbeat.start()

    @classmethod
    async def open(cls, setup: TrainerSetup) -> Self:
        """Create the run if asked to, open it at the scheduler and begin the heartbeats."""
        clients = (
            AsyncBufferClient(setup.buffer, setup.options),
            AsyncEngineClient(setup.engine, setup.options),
            AsyncSchedulerClient(setup.scheduler, setup.options),
        )
        return await cls.open_with(setup, *clients)

    @classmethod
    async def open_with(
        cls,
        setup: TrainerSetup,
        buffer: AsyncBufferClient,
        engine: AsyncEngineClient,
        scheduler: AsyncSchedulerClient,
    ) -> Self:
        """The same with clients that exist; the hooks close them in the end."""
        try:
            stores = Stores(setup.stores)
            if setup.buffer_config is not None:
                await buffer.calls.CreateRun(
                    buffer_pb2.CreateRunRequest(run_id=setup.run_id, config=setup.buffer_config)
                )
            opened = await scheduler.calls.OpenRun(
                scheduler_pb2.OpenRunRequest(
                    run_id=setup.run_id,
                    config=setup.config,
                    buffer_target=setup.buffer,
                    engine_target=setup.engine,
                    resume=setup.resume,
                    take_over=setup.take_over,
                )
            )
        except BaseException:
            for client in (buffer, engine, scheduler):
                await client.close()
            raise
        return cls(setup, buffer, engine, scheduler, stores, opened)

    @property
    def mode(self) -> events_pb2.Mode.ValueType:
        """Who has the hybrid GPUs, as the scheduler said last."""
        return self._lending.mode

    async def close(self, *, reason: str | None = None) -> None:
        """Stop the heartbeats and close the connections. With a reason the run is closed at the scheduler too.

        That takes GPUs back which are lent. Raises TurnoutError / RECLAIM_FAILED or ABORT_LEND_FAILED if it cannot;
        then the scheduler holds them for this run until CloseRun succeeds, or a trainer opens the run again.
        """
        try:
            if reason is not None:
                await self.scheduler.calls.CloseRun(
                    scheduler_pb2.CloseRunRequest(run_id=self.setup.run_id, epoch=self.epoch, reason=reason)
                )
        finally:
            self._span.end()
            self._heartbeat.stop()
            self._restoring.close()
            for owner in self._owners:
                await self.buffer.link.blocking(owner.stop)
            self._stores.close()
            for client in (self.buffer, self.engine, self.scheduler):
                await client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the run stays open, for a trainer that resumes.
        await self.close(reason="finished" if error is None else None)

    # ------------------------------------------------------------------------------------------------------ beginning

    async def on_init_end(self, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """After the model was loaded and hybrid replicas were registered: bring its weights to all engines."""
        self._check()
        update = self._callback(update_weights)
        version = self.next_step - 1
        if self._lending.open is not None:
            return await self._lending.fulfil(self._lending.open, update)
        return await self._lending.update_standalone(update, version, allow_older=self._allow_older)

    async def on_train_begin(self, groups: Sequence[buffer_pb2.GroupSpec] = ()) -> int:
        """Add the warm-up prompts; `warmup_groups` tells how many are wanted. Returns how many were added."""
        self._check()
        return await self.add_groups(self.next_step, groups) if groups else 0

    async def add_groups(
        self, step: int, groups: Sequence[buffer_pb2.GroupSpec], *, end_of_prompts: bool = False
    ) -> int:
        """Add prompts born at `step`: all of them or none. Returns how many.

        `end_of_prompts` says that no more will come, so that waits that cannot be met any more end EXHAUSTED.
        """
        self._check()
        request = buffer_pb2.AddGroupsRequest(
            run_id=self.setup.run_id,
            partition=self.setup.partition,
            epoch=self.epoch,
            step=step,
            groups=groups,
            end_of_prompts=end_of_prompts,
        )
        return (await self.buffer.calls.AddGroups(request)).added

    # ---------------------------------------------------------------------------------------------------------- steps

    async def on_step_begin(self, step: int) -> events_pb2.Mode.ValueType:
        """Open a step. Takes the GPUs back if enough groups are ready; else prepare_step does. Returns the mode."""
        self._check()
        self._span.begin(self.setup.run_id, step)
        request = scheduler_pb2.BeginStepRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step)
        self._lending.tell_standalone(request)
        response = await self.scheduler.calls.BeginStep(request)
        self._lending.untold = None
        self._lending.mode = response.mode
        return response.mode

    async def prepare_step(self, step: int) -> dict[str, float]:
        """After the step's prompts were added: wait until the trainer has its GPUs, as long as it takes.

        Returns timings and what was evicted. If supply cannot reach the threshold the GPUs come back all the same.
        """
        self._check()
        done = await self.scheduler.prepare_step(
            scheduler_pb2.PrepareStepRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step, cursor=self.cursor),
            refills=self._refills,
            on_progress=self.setup.on_progress,
        )
        self._lending.mode = done.mode
        self.cursor = done.next_cursor
        if done.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED:
            _log.warning("step %d: %s", step, done.reason)
        return dict(done.metrics)

    async def on_sample_begin(
        self, step: int, mini_batch: int, update_weights: UpdateWeights | None = None
    ) -> dict[str, float]:
        """Announce a mini-batch, and begin to measure the wait for it. Returns what was evicted meanwhile.

        If the scheduler lends within the step (only with config.can_reinstall), weights move and the call waits until
        the GPUs are back.
        """
        self._check()
        key = (step, mini_batch)
        metrics: dict[str, float] = {}
        while True:
            attempt = self._next_attempt.get(key, 0)
            done, next_attempt = await self.scheduler.begin_sample(
                scheduler_pb2.BeginSampleRequest(
                    run_id=self.setup.run_id,
                    epoch=self.epoch,
                    step=step,
                    mini_batch=mini_batch,
                    attempt=attempt,
                    cursor=self.cursor,
                ),
                refills=self._refills,
                on_progress=self.setup.on_progress,
            )
            self.cursor = done.next_cursor
            _add(metrics, done.evictions.metrics)
            if not done.HasField("lend"):
                break
            await self._lending.fulfil(done.lend, self._callback(update_weights))
            # Kept, so that a repeat after an error goes on from here instead of fulfilling the lend a second time.
            self._next_attempt = {key: next_attempt}
        self._sample_began = self.scheduler.link.now()
        return metrics

    async def sample(self, step: int, mini_batch: int, batch: int, *, max_wait: float | None = None) -> AsyncBatch:
        """Wait for `batch` groups and lease them. Raises NotReached if supply ends, or max_wait (wall seconds) passes.

        Calling it again for the same mini-batch, after an error or a crash of the service, gives the same groups.
        Standalone replicas that came back without weights get them from inside the wait, by the `update_weights` that
        moved some last (see WeightTarget.restoring); what it raises comes out of here. How many that were is in the
        batch's metrics: turnout/weights/restored.
        """
        self._check()
        key = (step, mini_batch)
        request = buffer_pb2.SampleRequest(
            run_id=self.setup.run_id,
            partition=self.setup.partition,
            epoch=self.epoch,
            step=step,
            batch=batch,
            max_wait=None if max_wait is None else duration(max_wait),
            cursor=self.cursor,
            request_id=f"sample/{self.epoch}/{step}/{mini_batch}/{self._releases.get(key, 0)}",
        )
        restored = self._restoring.restored
        sampled = await self.buffer.sample(
            request,
            refills=self._refills,
            on_progress=self.setup.on_progress,
            meanwhile=self._restoring_wait(mini_batch),
        )
        if sampled.done.outcome != buffer_pb2.WAIT_OUTCOME_REACHED:
            raise NotReached(sampled.done)
        self.cursor = sampled.done.next_cursor

        def released() -> None:
            self._releases[key] = self._releases.get(key, 0) + 1

        taken = AsyncBatch(
            self.buffer, sampled, self._stores, run_id=self.setup.run_id, epoch=self.epoch, on_release=released
        )
        if self._restoring.restored > restored:
            taken.metrics["turnout/weights/restored"] = float(self._restoring.restored - restored)
        return taken

    async def on_sample_end(
        self, step: int, mini_batch: int, *, tokens: int | None = None, wait_seconds: float | None = None
    ) -> float:
        """Report the wait for the mini-batch, in domain seconds: measured since on_sample_begin, unless given."""
        self._check()
        if wait_seconds is None:
            if self._sample_began is None:
                raise RuntimeError("on_sample_end without on_sample_begin; or pass wait_seconds")
            wait_seconds = (self.scheduler.link.now() - self._sample_began) / self.time_scale
        self._sample_began = None
        await self.scheduler.calls.EndSample(
            scheduler_pb2.EndSampleRequest(
                run_id=self.setup.run_id,
                epoch=self.epoch,
                step=step,
                mini_batch=mini_batch,
                wait=duration(wait_seconds),
                tokens=tokens,
            )
        )
        return wait_seconds

    async def on_step_end(self, step: int, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """Close a step: the scheduler decides, the step's weights reach the engines, and GPUs are lent or not.

        Returns the metrics of the step: separate_async/*, timing_s/*, and what the update of the standalone replicas
        cost their requests: turnout/weights/tokens_recomputed, and turnout/weights/blackout_s, the domain seconds
        without a replica that served. What the callback raises comes out of here, after the lend was abandoned.
        """
        self._check()
        update = self._callback(update_weights)
        response = await self.scheduler.calls.EndStep(
            scheduler_pb2.EndStepRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step)
        )
        if response.lend_failure:
            _log.warning("step %d: GPUs were not lent: %s", step, response.lend_failure)
        if response.HasField("lend"):
            moved = await self._lending.fulfil(response.lend, update)
        else:
            moved = await self._lending.update_standalone(update, step, allow_older=self._allow_older)
        self._span.end()
        return {**response.metrics, **moved}

    # ----------------------------------------------------------------------------------------- validation, checkpoints

    async def on_validate_begin(self, step: int, update_weights: UpdateWeights | None = None) -> dict[str, float]:
        """Make all GPUs available for validation; if the trainer has them, its weights move and they are lent."""
        self._check()
        response = await self.scheduler.calls.BeginValidation(
            scheduler_pb2.BeginValidationRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step)
        )
        if not response.HasField("lend"):
            return {}
        return await self._lending.fulfil(response.lend, self._callback(update_weights))

    async def on_validate_end(self, step: int) -> None:
        """Close validation. The GPUs stay lent."""
        self._check()
        await self.scheduler.calls.EndValidation(
            scheduler_pb2.EndValidationRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step)
        )

    async def save(self, step: int) -> str:
        """Save buffer and scheduler; return the manifest, JSON to keep beside the trainer's own checkpoint.

        Commit the step's batches before: what is leased and not committed comes back after a resume.
        """
        self._check()
        response = await self.scheduler.calls.Save(
            scheduler_pb2.SaveRequest(run_id=self.setup.run_id, epoch=self.epoch, step=step)
        )
        return response.manifest_json

    # -------------------------------------------------------------------------------------------------------- weights

    async def move_bytes(self, target: WeightTarget, data: Bytes | Sequence[Bytes], *, info_json: str = "") -> None:
        """For an `update_weights` callback: send weights to the target through the controller.

        Trainers that move weights by their own means (NCCL, RDMA, files) do not need it.
        """
        await self._weights.move_bytes(target, data, info_json=info_json)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _check(self) -> None:
        if self._heartbeat.fenced is not None:
            raise self._heartbeat.fenced

    def _callback(self, update_weights: UpdateWeights | None) -> UpdateWeights:
        callback = update_weights or self.setup.update_weights
        if callback is None:
            raise ValueError("weights have to move: give update_weights to this hook or to TrainerSetup")
        self._update_weights = callback
        return callback

    def _restoring_wait(self, mini_batch: int) -> RestoringWait | None:
        version, update = self._lending.served, self._update_weights
        if version is None or update is None:
            return None
        # Until the first mini-batch is trained on, the trainer's weights are the published ones.
        has_them = mini_batch == 0 or self.setup.config.can_reinstall
        return self._restoring.during(update, version, unless_served=not has_them)


def _add(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    """Add up counts; of the staleness of evicted groups only the newest reading is kept."""
    for name, value in more.items():
        metrics[name] = metrics.get(name, 0.0) + value if name.endswith("evicted_samples") else value
