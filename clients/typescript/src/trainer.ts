/**
 * Hooks of a trainer: what it calls at the boundaries of its steps, in this order.
 *
 *     open, add(nextStep, warmupGroups), then for each step:
 *     stepBegin, add, prepareStep, miniBatch for each of them, stepEnd; at last close
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
  type GroupSpec,
  type Output,
  type PayloadRef,
  type RefillDue,
  ReleasePayloadRequest,
  ReleaseSampleRequest,
  ReplayBufferService,
  type RunConfig as BufferConfig,
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
  type RunConfig,
  SwitchSchedulerService,
} from "../gen/turnout/scheduler/v1/scheduler.js";
import { TurnoutError } from "./errors.js";
import { Link } from "./link.js";
import { getPayloads } from "./payloads.js";
import { whileRestoring } from "./restoring.js";
import { duration } from "./values.js";
import { waitFor } from "./waits.js";
import { install, type WeightsOf } from "./weights.js";

const LONGEST_WAIT_MS = 3_600_000;
/** A call that answers when GPUs have moved: the scheduler waits for engines that are away. */
const TRANSITION = { totalMs: 600_000, attemptMs: 600_000 };
const HEARTBEAT_MS = 5_000;

export interface TrainerSetup {
  runId: string;
  /** gRPC targets, as trainer and scheduler reach them. */
  buffer: string;
  engine: string;
  scheduler: string;
  /** How the run trains and switches. */
  config: RunConfig;
  /** The run's partition and size of groups in the buffer. */
  bufferConfig: BufferConfig;
  /** Bytes of a version, as the engines load them. */
  weightsOf: WeightsOf;
}

/** A mini-batch under its lease. */
export interface Batch {
  groups: SampledGroup[];
  /** All outputs, by group, trajectory and position, and the payload of each. */
  outputs: Output[];
  payloads: Uint8Array[];
}

export class TrainerHooks {
  /** Lends that this trainer completed. */
  lends = 0;
  private cursor = 0n;
  /** Version that standalone replicas are to have. */
  private served: bigint | undefined;
  private readonly ended = new AbortController();
  private beating: Promise<void> = Promise.resolve();

  private constructor(
    readonly setup: TrainerSetup,
    /** Connections to the three services. */
    readonly buffer: Link,
    readonly engine: Link,
    readonly scheduler: Link,
    private readonly epoch: bigint,
    /** First step to train. */
    readonly nextStep: bigint,
    /** Groups to add before it, so that generation has a start. */
    readonly warmupGroups: number,
  ) {}

  /** Creates the run in the buffer, opens it at the scheduler, and fulfils the lend of the start. */
  static async open(setup: TrainerSetup): Promise<TrainerHooks> {
    const { runId } = setup;
    const [buffer, engine, scheduler] = [new Link(setup.buffer), new Link(setup.engine), new Link(setup.scheduler)];
    const config = { runId, config: setup.bufferConfig };
    await buffer.call(ReplayBufferService.createRun, CreateRunRequest.fromPartial(config));
    const opened = await scheduler.call(
      SwitchSchedulerService.openRun,
      OpenRunRequest.fromPartial({
        runId,
        config: setup.config,
        bufferTarget: setup.buffer,
        engineTarget: setup.engine,
      }),
      TRANSITION,
    );
    const { epoch, nextStep, warmupGroups } = opened;
    const hooks = new TrainerHooks(setup, buffer, engine, scheduler, epoch, nextStep, Number(warmupGroups));
    hooks.cursor = opened.cursor;
    hooks.beating = hooks.heartbeat();
    try {
      if (opened.lend) await hooks.fulfil(opened.lend);
    } catch (error) {
      // Heartbeats would keep the run from every other trainer.
      await hooks.close(false);
      throw error;
    }
    return hooks;
  }

  /** Adds prompts. `endOfPrompts`: there are no more, and waits that need more end EXHAUSTED. */
  async add(step: bigint, groups: GroupSpec[], endOfPrompts = false): Promise<void> {
    const first = groups[0];
    if (first === undefined) return;
    await this.buffer.call(
      ReplayBufferService.addGroups,
      AddGroupsRequest.fromPartial({
        ...this.place,
        step,
        groups,
        endOfPrompts,
        requestId: `add-${first.groupId}-${groups.length}`,
      }),
    );
  }

  /** Begins a step; GPUs that are lent come back here if enough groups are ready. */
  async stepBegin(step: bigint): Promise<void> {
    const request = BeginStepRequest.fromPartial({ ...this.at, step });
    await this.again(() => this.scheduler.call(SwitchSchedulerService.beginStep, request, TRANSITION));
  }

  /** Waits until the GPUs are the trainer's again. */
  async prepareStep(step: bigint): Promise<void> {
    for (let attempt = 0; ; attempt++) {
      const done = await this.again(() =>
        waitFor(
          this.scheduler,
          SwitchSchedulerService.prepareStep,
          (left) =>
            PrepareStepRequest.fromPartial({
              ...this.at,
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

  /**
   * Waits for a mini-batch; standalone replicas that came back without weights get them meanwhile. Lets `train` have it
   * and commits it; releases it if `train` throws.
   */
  async miniBatch(step: bigint, miniBatch: number, size: number, train: (batch: Batch) => Promise<void>): Promise<void> {
    await this.sampleBegin(step, miniBatch);
    const began = performance.now();
    const depth = await this.whileRestoring(this.waitForDepth(step, size));
    if (depth.outcome !== WaitOutcome.WAIT_OUTCOME_REACHED) throw new Error(`no mini-batch: ${depth.reason}`);
    const { done, groups } = await this.sample(step, miniBatch, size);
    const wait = duration(performance.now() - began);
    const end = EndSampleRequest.fromPartial({ ...this.at, step, miniBatch, wait });
    await this.scheduler.call(SwitchSchedulerService.endSample, end);
    const lease = { ...this.at, leaseId: done.leaseId };
    try {
      await train(await this.batchOf(done.leaseId, groups));
    } catch (error) {
      const request = ReleaseSampleRequest.fromPartial(lease);
      await this.buffer.call(ReplayBufferService.releaseSample, request).catch(() => undefined);
      throw error;
    }
    await this.buffer.call(ReplayBufferService.commitSample, CommitSampleRequest.fromPartial(lease));
    await this.buffer.call(ReplayBufferService.releasePayload, ReleasePayloadRequest.fromPartial(lease));
  }

  /** Ends a step: moves its weights to the engines, and lends the GPUs if the scheduler decides so. */
  async stepEnd(step: bigint): Promise<void> {
    const request = EndStepRequest.fromPartial({ ...this.at, step });
    const ended = await this.again(() => this.scheduler.call(SwitchSchedulerService.endStep, request, TRANSITION));
    if (ended.lend) await this.fulfil(ended.lend);
    else await this.update(ReplicaRole.REPLICA_ROLE_STANDALONE, [], step, false);
  }

  /** Closes the run, or with `finished` false leaves it to a trainer that resumes. */
  async close(finished = true): Promise<void> {
    this.ended.abort();
    await this.beating;
    try {
      const request = CloseRunRequest.fromPartial({ ...this.at, reason: "finished" });
      if (finished) await this.scheduler.call(SwitchSchedulerService.closeRun, request, TRANSITION);
    } finally {
      for (const link of [this.buffer, this.engine, this.scheduler]) link.close();
    }
  }

  private get at(): { runId: string; epoch: bigint } {
    return { runId: this.setup.runId, epoch: this.epoch };
  }

  private get place(): { runId: string; epoch: bigint; partition: string } {
    return { ...this.at, partition: this.setup.config.partition || "train" };
  }

  private async sampleBegin(step: bigint, miniBatch: number): Promise<void> {
    for (let attempt = 0; ; attempt++) {
      const { answer, nextCursor } = await this.again(() =>
        waitFor(
          this.scheduler,
          SwitchSchedulerService.beginSample,
          (left) =>
            BeginSampleRequest.fromPartial({
              ...this.at,
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
      if (answer?.$case === "proceed") return;
      if (answer?.$case === "lend") await this.fulfil(answer.value);
    }
  }

  private waitForDepth(step: bigint, size: number): Promise<WaitDone> {
    return waitFor(
      this.buffer,
      ReplayBufferService.waitForSampleable,
      (left) =>
        WaitForSampleableRequest.fromPartial({
          ...this.place,
          step,
          target: BigInt(size),
          maxWait: duration(left),
          cursor: this.cursor,
        }),
      LONGEST_WAIT_MS,
      { refill: this.decline },
    );
  }

  private async sample(
    step: bigint,
    miniBatch: number,
    size: number,
  ): Promise<{ done: SampleDone; groups: SampledGroup[] }> {
    const groups: SampledGroup[] = [];
    const done = await waitFor(
      this.buffer,
      ReplayBufferService.sample,
      (left) =>
        SampleRequest.fromPartial({
          ...this.place,
          step,
          batch: size,
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

  private async batchOf(leaseId: string, groups: SampledGroup[]): Promise<Batch> {
    const outputs = groups.flatMap((group) => group.trajectories.flatMap((one) => one.outputs));
    const refs = outputs.map(({ payload }): PayloadRef => {
      if (payload?.source?.$case !== "ref") throw new Error("a manifest without a reference");
      return payload.source.value;
    });
    return { groups, outputs, payloads: await getPayloads(this.buffer, this.setup.runId, { leaseId }, refs) };
  }

  /** These trainers have no prompts beyond those they add. */
  private readonly decline = async ({ refillClaimId }: RefillDue): Promise<void> => {
    const request = DeclineRefillRequest.fromPartial({ ...this.place, refillClaimId });
    await this.buffer.call(ReplayBufferService.declineRefill, request);
  };

  private async fulfil(lend: Lend): Promise<void> {
    const about = { ...this.at, lendId: lend.lendId };
    try {
      const { weightVersion, allowOlder } = lend;
      const standalone = lend.updateStandalone
        ? await this.update(ReplicaRole.REPLICA_ROLE_STANDALONE, [], weightVersion, allowOlder)
        : undefined;
      const hybrid = await this.update(ReplicaRole.REPLICA_ROLE_HYBRID, lend.replicaIds, weightVersion, allowOlder);
      await this.again(() =>
        this.scheduler.call(
          SwitchSchedulerService.completeLend,
          CompleteLendRequest.fromPartial({
            ...about,
            hybridUpdate: duration(hybrid * 1000),
            ...(standalone === undefined ? {} : { standaloneUpdate: duration(standalone * 1000) }),
          }),
          TRANSITION,
        ),
      );
      this.lends++;
    } catch (error) {
      const request = AbandonLendRequest.fromPartial({ ...about, reason: String(error).slice(0, 500) });
      await this.scheduler.call(SwitchSchedulerService.abandonLend, request, TRANSITION).catch(() => undefined);
      throw error;
    }
  }

  private async update(
    role: ReplicaRole,
    replicaIds: string[],
    version: bigint,
    allowOlder: boolean,
  ): Promise<number> {
    const target = { ...this.at, role, replicaIds, version, allowOlder };
    const seconds = await this.again(() => install(this.engine, target, this.setup.weightsOf));
    if (role === ReplicaRole.REPLICA_ROLE_STANDALONE) this.served = version;
    return seconds;
  }

  private whileRestoring<T>(wait: Promise<T>): Promise<T> {
    if (this.served === undefined) return wait;
    const role = ReplicaRole.REPLICA_ROLE_STANDALONE;
    const target = { ...this.at, role, replicaIds: [], version: this.served, allowOlder: false };
    return whileRestoring(this.engine, target, this.setup.weightsOf, wait);
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
    const request = HeartbeatRequest.fromPartial(this.at);
    while (!signal.aborted) {
      await this.scheduler.call(SwitchSchedulerService.heartbeat, request).catch((error: unknown) => {
        // Other calls say so too, and theirs is the error that counts.
        if (!signal.aborted) process.stderr.write(`heartbeat: ${error}\n`);
      });
      await sleep(HEARTBEAT_MS, undefined, { signal }).catch(() => undefined);
    }
  }
}
