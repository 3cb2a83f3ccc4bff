/** A rollout worker: claims trajectories, generates, hands the results in. */
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import {
  type Claim,
  type ClaimToken,
  ClaimGroupsRequest,
  FinishTrajectoriesRequest,
  RenewClaimsRequest,
  ReplayBufferService,
  SegmentEnd,
} from "../gen/turnout/buffer/v1/buffer.js";
import { duration, itemError, type Link, packTokens, TOKENS, TurnoutError, unpackTokens } from "../src/index.js";
import { generate } from "./generation.js";
import { type Job, PARTITION, rewardOf } from "./job.js";

const CONCURRENCY = 16;
const RENEW_MS = 60_000;

export class Worker {
  /** Generations that a service's end cut, and that went on. */
  readonly outages = { count: 0 };
  private readonly live = new Map<string, ClaimToken>();
  private readonly stopping = new AbortController();
  private atWork = 0;

  constructor(
    private readonly job: Job,
    private readonly buffer: Link,
    private readonly engine: Link,
  ) {}

  /** Ends `run` once the trajectories at work are handed in. */
  stop(): void {
    this.stopping.abort();
  }

  /** Works until `stop`; throws what no repetition helps against. */
  async run(): Promise<void> {
    const failures: unknown[] = [];
    const tasks = new Set<Promise<void>>();
    const renewing = this.renew();
    while (!this.stopping.signal.aborted && failures.length === 0) {
      const room = CONCURRENCY - this.atWork;
      if (room === 0) {
        await Promise.race(tasks);
        continue;
      }
      for (const claim of await this.claim(room)) {
        this.atWork += claim.trajectories.length;
        const task = this.work(claim)
          .catch((error: unknown) => void failures.push(error))
          .finally(() => {
            this.atWork -= claim.trajectories.length;
            tasks.delete(task);
          });
        tasks.add(task);
      }
    }
    await Promise.all(tasks);
    this.stop();
    await renewing;
    if (failures.length) throw failures[0];
  }

  private async claim(room: number): Promise<Claim[]> {
    const request = ClaimGroupsRequest.fromPartial({
      runId: this.job.runId,
      partition: PARTITION,
      workerId: "typescript-worker",
      maxTrajectories: room,
      maxWait: duration(1_000),
      requestId: randomUUID(),
    });
    try {
      return (await this.buffer.call(ReplayBufferService.claimGroups, request)).claims;
    } catch (error) {
      // The trainer makes the run; until then there is nothing to claim.
      if (!(error instanceof TurnoutError && error.reason === "RUN_NOT_FOUND")) throw error;
      await sleep(250, undefined, { signal: this.stopping.signal }).catch(() => undefined);
      return [];
    }
  }

  private async work(claim: Claim): Promise<void> {
    const { token, groupId, prompt } = claim;
    if (token === undefined || prompt?.source?.$case !== "inline") throw new Error(`${groupId}: a claim without its prompt`);
    const tokens = unpackTokens(prompt.source.value);
    this.live.set(token.claimId, token);
    try {
      await Promise.all(claim.trajectories.map(({ index }) => this.finish(token, groupId, index, tokens)));
    } finally {
      this.live.delete(token.claimId);
    }
  }

  private async finish(token: ClaimToken, groupId: string, index: number, prompt: number[]): Promise<void> {
    const { runId } = this.job;
    const trajectory = { runId, groupId, index, attempt: token.attempt, prompt };
    const { tokenIds, segments } = await generate(this.engine, trajectory, this.outages);
    const output = {
      promptTokens: BigInt(prompt.length),
      segments: segments.map((segment, at) => ({
        tokens: segment.tokens,
        weightVersion: segment.weightVersion,
        end: at + 1 < segments.length ? SegmentEnd.SEGMENT_END_CONTINUED : SegmentEnd.SEGMENT_END_COMPLETED,
        replicaId: segment.replicaId,
      })),
      rewards: { reward: rewardOf(tokenIds) },
      payload: { source: { $case: "inline" as const, value: packTokens(tokenIds) }, contentType: TOKENS },
    };
    const { outcomes } = await this.buffer.call(
      ReplayBufferService.finishTrajectories,
      FinishTrajectoriesRequest.fromPartial({
        runId,
        partition: PARTITION,
        results: [{ token, groupId, index, outputs: [output] }],
      }),
    );
    for (const outcome of outcomes) {
      const error = itemError(outcome);
      if (error) throw error;
    }
  }

  private async renew(): Promise<void> {
    const { signal } = this.stopping;
    while (!signal.aborted) {
      await sleep(RENEW_MS, undefined, { signal }).catch(() => undefined);
      if (signal.aborted || this.live.size === 0) continue;
      const request = RenewClaimsRequest.fromPartial({ runId: this.job.runId, tokens: [...this.live.values()] });
      await this.buffer.call(ReplayBufferService.renewClaims, request);
    }
  }
}
