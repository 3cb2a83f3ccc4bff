"""The trainer of the job: GRPO in torch, behind the client's hooks.

    python -P -m services.learner.trainer ASSIGNMENT

Its lines are those of the demo's trainer (services.demo.events) and two of its own:

    learned   step, reward (mean over the step's answers), loss, clipped_share, ratio_error
    synced    version, replicas, differing: replicas that took the version, and those whose greedy output differs;
              answers: what the trainer's model answers, by prompt

Invariants: it talks to the services through the client alone; a step trains on what its own weights sampled; weights
travel as one safetensors file with its checksum, and what each replica computes with them is compared at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

import google_crc32c
import torch

from services.demo.process import run_process
from services.demo.report import Reporter
from services.learner.alphabet import decode
from services.learner.assignment import Assignment
from services.learner.comparer import differing
from services.learner.grpo import Learner, Outcome, Rollout, Settings
from services.learner.job import PARTITION, Job
from services.learner.model import checkpoint_bytes, greedy, make_model
from services.learner.supply import Question, load, questions
from services.learner.worker import REWARD
from turnout.buffer.v1 import buffer_pb2
from turnout.client import duration
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncBatch, AsyncTrainerHooks, Moved, TrainerSetup, WeightTarget
from turnout.worker import pack, unpack

POLICY: Final = "fixed"
"""Lends at the end of every step that another follows, since no step begins with groups that are ready."""

COMPARED_PROMPTS: Final = 4
CLAIM_S: Final = 600.0


class DataDamaged(Exception):
    """An answer is not one that can be trained on."""


class Trainer:
    """One job from its first to its last step."""

    def __init__(self, assignment: Assignment, reporter: Reporter) -> None:
        self._job = assignment.job
        self._assignment = assignment
        self._reporter = reporter
        prompts = load(assignment.prompts)
        self._compared = [tokens for _, tokens in prompts[:COMPARED_PROMPTS]]
        self._questions: Iterator[Question] = questions(prompts, self._job.seed)
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._added = 0
        self._took: list[str] = []
        self._learner = Learner(make_model(self._job.seed), Settings(learning_rate=self._job.learning_rate))
        self._hooks: AsyncTrainerHooks

    async def run(self) -> None:
        """Train the whole job."""
        began = time.monotonic()
        job = self._job
        setup = TrainerSetup(
            run_id=job.run_id,
            config=run_config(job),
            scheduler=self._assignment.scheduler,
            buffer=self._assignment.buffer,
            engine=self._assignment.engine,
            buffer_config=buffer_config(job),
            update_weights=self._move_weights,
            refill_fn=self._make_groups,
        )
        self._hooks = await AsyncTrainerHooks.open(setup)
        try:
            self._begin()
            self._reporter.state("updating", 0)
            await self._hooks.on_init_end()
            await self._compare(0)
            for step in range(self._hooks.next_step, job.steps + 1):
                await self._step(step)
            await self._tell_ledger()
            self._reporter.tell("job_ended", real_seconds=round(time.monotonic() - began, 3))
        finally:
            await self._hooks.close(reason="the job is done")

    def _begin(self) -> None:
        job = self._job
        self._reporter.begin(
            steps=job.steps,
            batch_size=job.batch_size,
            group_size=job.group_size,
            policy=POLICY,
        )

    async def _step(self, step: int) -> None:
        job, reporter, hooks = self._job, self._reporter, self._hooks
        reporter.tell("step_began", step=step)
        reporter.state("waiting", step)
        await hooks.on_step_begin(step)
        groups = self._make_groups(job.batch_size)
        self._added += len(groups)
        await hooks.add_groups(step, groups, end_of_prompts=self._added >= job.total_groups)
        await hooks.prepare_step(step)
        rewards: list[float] = []
        outcomes: list[Outcome] = []
        for mini_batch in range(job.mini_batches):
            reporter.state("waiting", step)
            await hooks.on_sample_begin(step, mini_batch)
            batch = await hooks.sample(step, mini_batch, job.mini_batch_size)
            await hooks.on_sample_end(step, mini_batch, tokens=batch.tokens)
            reporter.state("training", step)
            rollouts = await self._read(step, batch)
            outcomes.append(await asyncio.to_thread(self._learner.learn, rollouts))
            await batch.commit()
            rewards += [rollout.reward for group in rollouts for rollout in group]
        reporter.tell(
            "learned",
            step=step,
            reward=sum(rewards) / len(rewards),
            loss=outcomes[0].loss,
            clipped_share=max(outcome.clipped_share for outcome in outcomes),
            # Later changes of a step are off the policy that sampled, by design; the first one is not.
            ratio_error=outcomes[0].ratio_error,
        )
        reporter.state("updating", step)
        await hooks.on_step_end(step)
        await self._compare(step)
        reporter.tell("step_ended", step=step)

    async def _read(self, step: int, batch: AsyncBatch) -> list[list[Rollout]]:
        payloads = iter(await batch.payloads())
        groups = []
        for group in batch.groups:
            rollouts, lengths = [], []
            for trajectory in group.trajectories:
                for output in trajectory.outputs:
                    answer, logprobs = unpack(next(payloads), output.payload.content_type)
                    if len(answer) != self._job.answer_tokens or len(logprobs) != len(answer):
                        sizes = f"{len(answer)} tokens, {len(logprobs)} log-probabilities"
                        raise DataDamaged(f"{group.group_id}/{trajectory.index}: {sizes}")
                    prompt = self._tokens[group.group_id]
                    rollouts.append(Rollout(prompt, answer, logprobs, output.rewards[REWARD]))
                    lengths.append(len(answer))
            self._reporter.tell("group_trained", group_id=group.group_id, step=step, tokens=lengths)
            groups.append(rollouts)
        return groups

    def _make_groups(self, wanted: int) -> list[buffer_pb2.GroupSpec]:
        made = []
        for question in islice(self._questions, wanted):
            prompt, content_type = pack(question.tokens)
            self._tokens[question.group_id] = question.tokens
            made.append(
                buffer_pb2.GroupSpec(
                    group_id=question.group_id,
                    group_size=self._job.group_size,
                    prompt=buffer_pb2.Payload(inline=prompt, content_type=content_type),
                    tags={"prompt_id": question.prompt_id},
                )
            )
            self._reporter.tell("group_added", group_id=question.group_id, prompt_id=question.prompt_id)
        return made

    async def _move_weights(self, target: WeightTarget) -> Moved:
        data = checkpoint_bytes(self._learner.model)
        await self._hooks.move_bytes(target, data)
        self._took += target.replica_ids
        return Moved(checksums=dict.fromkeys(target.replica_ids, f"{google_crc32c.value(data):08x}"))

    async def _compare(self, version: int) -> None:
        took, self._took = self._took, []
        expected = greedy(self._learner.model, self._compared, self._job.answer_tokens)
        wrong = await differing(
            self._hooks.engine,
            run_id=self._job.run_id,
            replica_ids=took,
            prompts=self._compared,
            expected=expected,
        )
        answers = {decode(prompt): decode(answer) for prompt, answer in zip(self._compared, expected, strict=True)}
        self._reporter.tell("synced", version=version, replicas=took, differing=wrong, answers=answers)

    async def _tell_ledger(self) -> None:
        request = buffer_pb2.GetLedgerRequest(run_id=self._job.run_id, partition=PARTITION)
        ledger = await self._hooks.buffer.calls.GetLedger(request)
        present = ledger.present
        self._reporter.tell(
            "ledger",
            added=ledger.added,
            committed=ledger.committed,
            evicted=ledger.evicted,
            present=present.pending + present.running + present.finished + present.failed + present.sampled,
        )


def run_config(job: Job) -> scheduler_pb2.RunConfig:
    """Return the job as the scheduler sees it."""
    return scheduler_pb2.RunConfig(
        switch=scheduler_pb2.SwitchConfig(enable_switch=True),
        policy=POLICY,
        train_batch_size=job.batch_size,
        parameter_sync_step=job.mini_batches,
        mini_batch_size=job.mini_batch_size,
        total_training_steps=job.steps,
        hybrid_gpus=1,
        standalone_gpus=1,
        partition=PARTITION,
        num_warmup_batches=0.0,
        group_size=job.group_size,
        max_response_tokens=job.answer_tokens,
    )


def buffer_config(job: Job) -> buffer_pb2.RunConfig:
    """Return the job as the buffer sees it."""
    partition = buffer_pb2.PartitionConfig(
        name=PARTITION, kind=buffer_pb2.PARTITION_KIND_TRAINING, default_group_size=job.group_size
    )
    return buffer_pb2.RunConfig(
        partitions=[partition],
        train_batch_size=job.batch_size,
        lease_times=buffer_pb2.LeaseTimes(claim=duration(CLAIM_S)),
    )


def main() -> None:
    """Be the trainer's process."""
    torch.set_num_threads(max((os.cpu_count() or 2) // 2, 1))
    assignment = Assignment.from_json(sys.argv[1])
    run_process("trainer", Trainer(assignment, Reporter(1.0)).run())


if __name__ == "__main__":
    main()
