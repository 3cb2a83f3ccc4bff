/**
 * A trainer that calls the scheduler in the order its contract gives, and trains by reading every byte of its batches.
 *
 * Invariants: every call carries the epoch; a lend that began is completed or abandoned; the eviction cursor goes
 * through all waits; a transition that failed is repeated, since it goes on with what is left.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import {
  AddGroupsRequest,
  CommitSampleRequest,
  CreateRunRequest,
  DeclineRefillRequest,
  GetLedgerRequest,
  GetRunRequest,
  type PayloadRef,
  type RefillDue,
  ReleasePayloadRequest,
  ReplayBufferService,
  type SampleDone,
  type SampledGroup,
  SampleRequest,
  type WaitDone,
  WaitForSampleableRequest,
  WaitOutcome,
} from "../gen/turnout/buffer/v1/buffer.js";
import { ReplicaRole } from "../gen/turnout/engine/v1/engine.js";
import {
  AbandonLendRequest,
  BeginSampleRequest,
  BeginStepRequest,
  CloseRunRequest,
  CompleteLendRequest,
  EndSampleRequest,
  EndStepRequest,
  HeartbeatRequest,
  type Lend,
  OpenRunRequest,
  PrepareStepRequest,
  SwitchSchedulerService,
} from "../gen/turnout/scheduler/v1/scheduler.js";
import { crc32c, duration, getPayloads, type Link, TurnoutError, unpackTokens, waitFor } from "../src/index.js";
import { BATCH, GROUP_SIZE, groupOf, type Job, MAX_TOKENS, MINI_BATCHES, PARTITION, rewardOf, tell } from "./job.js";
import { install } from "./weights.js";

const MINI_BATCH = BATCH / MINI_BATCHES;
const LONGEST_WAIT_MS = 300_000;
const HEARTBEAT_MS = 5_000;

export interface Links {
  buffer: Link;
  engine: Link;
  scheduler: Link;
}

/** What was trained on, comparable between languages. */
export interface Trained {
  groupId: string;
  tokens: number[];
  crc32c: string[];
  rewards: number[];
}

export class Trainer {
  readonly trained: Trained[] = [];
  /** Lends completed and reclaims made, as far as this trainer took part. */
  lends = 0;
  /** Resolves once the run exists in the buffer; rejects if it cannot be made. */
  readonly created: Promise<void>;
  private tellCreated!: () => void;
  private tellFailed!: (error: unknown) => void;
  private epoch = 0n;
  private cursor = 0n;
  private added = 0;
  private readonly ended = new AbortController();

  constructor(
    private readonly job: Job,
    private readonly links: Links,
  ) {
    this.created = new Promise((resolve, reject) => {
      this.tellCreated = resolve;
      this.tellFailed = reject;
    });
  }

  /** Trains the whole job; the run then stays closed. */
  async run(): Promise<Record<string, unknown>> {
    const { buffer, scheduler } = this.links;
    const { runId, steps } = this.job;
    const creating = buffer.call(
      ReplayBufferService.createRun,
      CreateRunRequest.fromPartial({
        runId,
        config: { partitions: [{ name: PARTITION, defaultGroupSize: GROUP_SIZE }], trainBatchSize: BATCH },
      }),
    );
    creating.then(this.tellCreated, this.tellFailed);
    await creating;
    const firstIncarnation = await this.incarnation();
    const opened = await scheduler.call(
      SwitchSchedulerService.openRun,
      OpenRunRequest.fromPartial({
        runId,
        config: {
          switch: { enableSwitch: true },
          policy: "verl",
          trainBatchSize: BATCH,
          parameterSyncStep: MINI_BATCHES,
          miniBatchSize: MINI_BATCH,
          totalTrainingSteps: BigInt(steps),
          hybridGpus: 1,
          standaloneGpus: 1,
          partition: PARTITION,
          numWarmupBatches: 1,
          groupSize: GROUP_SIZE,
          maxResponseTokens: BigInt(MAX_TOKENS),
        },
        bufferTarget: this.job.buffer,
        engineTarget: this.job.engine,
      }),
    );
    this.epoch = opened.epoch;
    this.cursor = opened.cursor;
    const beating = this.heartbeat();
    try {
      if (opened.lend) await this.fulfil(opened.lend);
      await this.add(opened.nextStep, Number(opened.warmupGroups));
      for (let step = opened.nextStep; step <= BigInt(steps); step++) await this.step(step);
      const ledger = await buffer.call(
        ReplayBufferService.getLedger,
        GetLedgerRequest.fromPartial({ runId, partition: PARTITION }),
      );
      await scheduler.call(
        SwitchSchedulerService.closeRun,
        CloseRunRequest.fromPartial({ runId, epoch: this.epoch, reason: "finished" }),
      );
      return {
        // Numbers here are far below 2**53; what is not goes through String.
        added: Number(ledger.added),
        committed: Number(ledger.committed),
        evicted: Number(ledger.evicted),
        groups: this.trained.sort((one, other) => (one.groupId < other.groupId ? -1 : 1)),
        lends: this.lends,
        restarted: (await this.incarnation()) !== firstIncarnation,
      };
    } finally {
      this.ended.abort();
      await beating;
    }
  }

  private async step(step: bigint): Promise<void> {
    const { scheduler } = this.links;
    const at = { runId: this.job.runId, epoch: this.epoch, step };
    await this.again(() => scheduler.call(SwitchSchedulerService.beginStep, BeginStepRequest.fromPartial(at)));
    await this.add(step, BATCH);
    tell({ at: "added", step: Number(step) });
    await this.prepare(step);
    for (let miniBatch = 0; miniBatch < MINI_BATCHES; miniBatch++) await this.miniBatch(step, miniBatch);
    const ended = await this.again(() =>
      scheduler.call(SwitchSchedulerService.endStep, EndStepRequest.fromPartial(at)),
    );
    if (ended.lend) await this.fulfil(ended.lend);
    else await this.update(ReplicaRole.REPLICA_ROLE_STANDALONE, [], step, false);
    tell({ at: "trained", step: Number(step) });
  }

  /** Waits until the GPUs are the trainer's again. */
  private async prepare(step: bigint): Promise<void> {
    for (let attempt = 0; ; attempt++) {
      const done = await this.again(() =>
        waitFor(
          this.links.scheduler,
          SwitchSchedulerService.prepareStep,
          (left) =>
            PrepareStepRequest.fromPartial({
              runId: this.job.runId,
              epoch: this.epoch,
              step,
              cursor: this.cursor,
              maxWait: duration(left),
              attempt,
            }),
          LONGEST_WAIT_MS,
          { refill: this.decline },
        ),
      );
      this.cursor = done.nextCursor;
      if (done.outcome === WaitOutcome.WAIT_OUTCOME_REACHED || done.outcome === WaitOutcome.WAIT_OUTCOME_EXHAUSTED) return;
    }
  }

  private async miniBatch(step: bigint, miniBatch: number): Promise<void> {
    const { buffer, scheduler } = this.links;
    const { runId } = this.job;
    const epoch = this.epoch;
    for (let attempt = 0; ; attempt++) {
      const { answer, nextCursor } = await this.again(() =>
        waitFor(
          scheduler,
          SwitchSchedulerService.beginSample,
          (left) =>
            BeginSampleRequest.fromPartial({
              runId,
              epoch,
              step,
              miniBatch,
              attempt,
              cursor: this.cursor,
              maxWait: duration(left),
            }),
          LONGEST_WAIT_MS,
          { refill: this.decline },
        ),
      );
      this.cursor = nextCursor;
      if (answer?.$case === "proceed") break;
      if (answer?.$case === "lend") await this.fulfil(answer.value);
    }
    const began = performance.now();
    const depth = await this.waitForDepth(step);
    if (depth.outcome !== WaitOutcome.WAIT_OUTCOME_REACHED) throw new Error(`no mini-batch: ${depth.reason}`);
    const { done, groups } = await this.sample(step, miniBatch);
    await scheduler.call(
      SwitchSchedulerService.endSample,
      EndSampleRequest.fromPartial({ runId, epoch, step, miniBatch, wait: duration(performance.now() - began) }),
    );
    await this.train(done.leaseId, groups);
    const lease = { runId, epoch, leaseId: done.leaseId };
    await buffer.call(ReplayBufferService.commitSample, CommitSampleRequest.fromPartial(lease));
    await buffer.call(ReplayBufferService.releasePayload, ReleasePayloadRequest.fromPartial(lease));
  }

  private waitForDepth(step: bigint): Promise<WaitDone> {
    return waitFor(
      this.links.buffer,
      ReplayBufferService.waitForSampleable,
      (left) =>
        WaitForSampleableRequest.fromPartial({
          runId: this.job.runId,
          partition: PARTITION,
          epoch: this.epoch,
          step,
          target: BigInt(MINI_BATCH),
          maxWait: duration(left),
          cursor: this.cursor,
        }),
      LONGEST_WAIT_MS,
      { refill: this.decline },
    );
  }

  private async sample(step: bigint, miniBatch: number): Promise<{ done: SampleDone; groups: SampledGroup[] }> {
    const groups: SampledGroup[] = [];
    const done = await waitFor(
      this.links.buffer,
      ReplayBufferService.sample,
      (left) =>
        SampleRequest.fromPartial({
          runId: this.job.runId,
          partition: PARTITION,
          epoch: this.epoch,
          step,
          batch: MINI_BATCH,
          maxWait: duration(left),
          cursor: this.cursor,
          // A repeat after a cut gets the same batch.
          requestId: `sample-${step}-${miniBatch}`,
        }),
      LONGEST_WAIT_MS,
      {
        refill: this.decline,
        other: (event) => void groups.push(...event.value.groups),
        rearmed: () => void groups.splice(0),
      },
    );
    if (done.outcome !== WaitOutcome.WAIT_OUTCOME_REACHED || groups.length !== done.groupCount) {
      throw new Error(`no mini-batch: ${done.reason}, ${groups.length} of ${done.groupCount} groups`);
    }
    this.cursor = done.nextCursor;
    return { done, groups };
  }

  private async train(leaseId: string, groups: SampledGroup[]): Promise<void> {
    const outputs = groups.flatMap((group) => group.trajectories.flatMap((one) => one.outputs));
    const refs = outputs.map(({ payload }): PayloadRef => {
      if (payload?.source?.$case !== "ref") throw new Error("a manifest without a reference");
      return payload.source.value;
    });
    const payloads = (await getPayloads(this.links.buffer, this.job.runId, { leaseId }, refs)).values();
    for (const group of groups) {
      const trained: Trained = { groupId: group.groupId, tokens: [], crc32c: [], rewards: [] };
      for (const output of group.trajectories.flatMap((one) => one.outputs)) {
        const data = payloads.next().value as Buffer;
        const tokenIds = unpackTokens(data);
        const length = output.segments.reduce((sum, segment) => sum + segment.tokens, 0n);
        if (BigInt(tokenIds.length) !== length || output.rewards["reward"] !== rewardOf(tokenIds)) {
          throw new Error(`${group.groupId}: the bytes are not those of its segments and rewards`);
        }
        trained.tokens.push(tokenIds.length);
        trained.crc32c.push(crc32c(data).toString(16).padStart(8, "0"));
        trained.rewards.push(rewardOf(tokenIds));
      }
      this.trained.push(trained);
    }
  }

  /** Adds the next prompts of the job; with the last of them supply ends. */
  private async add(step: bigint, wanted: number): Promise<void> {
    const total = this.job.steps * BATCH;
    const count = Math.min(wanted, total - this.added);
    if (count === 0) return;
    const groups = Array.from({ length: count }, (_, at) => groupOf(this.added + at));
    this.added += count;
    await this.links.buffer.call(
      ReplayBufferService.addGroups,
      AddGroupsRequest.fromPartial({
        runId: this.job.runId,
        partition: PARTITION,
        epoch: this.epoch,
        step,
        groups,
        endOfPrompts: this.added === total,
        requestId: `add-${this.added}`,
      }),
    );
  }

  /** This job has no prompts beyond its own. */
  private readonly decline = async ({ refillClaimId }: RefillDue): Promise<void> => {
    await this.links.buffer.call(
      ReplayBufferService.declineRefill,
      DeclineRefillRequest.fromPartial({
        runId: this.job.runId,
        partition: PARTITION,
        epoch: this.epoch,
        refillClaimId,
      }),
    );
  };

  private async fulfil(lend: Lend): Promise<void> {
    const { scheduler } = this.links;
    const about = { runId: this.job.runId, epoch: this.epoch, lendId: lend.lendId };
    try {
      const { weightVersion, allowOlder } = lend;
      const standalone = lend.updateStandalone
        ? await this.update(ReplicaRole.REPLICA_ROLE_STANDALONE, [], weightVersion, allowOlder)
        : undefined;
      const hybrid = await this.update(ReplicaRole.REPLICA_ROLE_HYBRID, lend.replicaIds, weightVersion, allowOlder);
      await this.again(() =>
        scheduler.call(
          SwitchSchedulerService.completeLend,
          CompleteLendRequest.fromPartial({
            ...about,
            hybridUpdate: duration(hybrid * 1000),
            ...(standalone === undefined ? {} : { standaloneUpdate: duration(standalone * 1000) }),
          }),
        ),
      );
      this.lends++;
    } catch (error) {
      const request = AbandonLendRequest.fromPartial({ ...about, reason: String(error).slice(0, 500) });
      await scheduler.call(SwitchSchedulerService.abandonLend, request);
      throw error;
    }
  }

  private update(role: ReplicaRole, replicaIds: string[], version: bigint, allowOlder: boolean): Promise<number> {
    const { runId } = this.job;
    return this.again(() =>
      install(this.links.engine, { runId, epoch: this.epoch, role, replicaIds, version, allowOlder }),
    );
  }

  /** Repeats what a restart of the controller or the scheduler cut. */
  private async again<T>(work: () => Promise<T>): Promise<T> {
    for (let attempt = 1; ; attempt++) {
      try {
        return await work();
      } catch (error) {
        const cut = error instanceof TurnoutError && [status.UNAVAILABLE, status.ABORTED].includes(error.code);
        if (!cut || attempt === 30) throw error;
        await sleep(500);
      }
    }
  }

  private async heartbeat(): Promise<void> {
    const { signal } = this.ended;
    while (!signal.aborted) {
      const request = HeartbeatRequest.fromPartial({ runId: this.job.runId, epoch: this.epoch });
      await this.links.scheduler.call(SwitchSchedulerService.heartbeat, request).catch((error: unknown) => {
        // Other calls say so too, and theirs is the error that counts.
        if (!signal.aborted) process.stderr.write(`heartbeat: ${error}\n`);
      });
      await sleep(HEARTBEAT_MS, undefined, { signal }).catch(() => undefined);
    }
  }

  private async incarnation(): Promise<string> {
    const request = GetRunRequest.fromPartial({ runId: this.job.runId });
    return (await this.links.buffer.call(ReplayBufferService.getRun, request)).incarnation;
  }
}
