/** The trainer of the job that all languages run: it trains by reading every byte of its batches. */
import {
  GetLedgerRequest,
  GetRunRequest,
  type GroupSpec,
  ReplayBufferService,
  RunConfig as BufferConfig,
} from "../gen/turnout/buffer/v1/buffer.js";
import { RunConfig } from "../gen/turnout/scheduler/v1/scheduler.js";
import { type Batch, crc32c, TrainerHooks, unpackTokens } from "../src/index.js";
import { BATCH, GROUP_SIZE, groupOf, type Job, MAX_TOKENS, MINI_BATCHES, PARTITION, rewardOf, tell, WEIGHT_BYTES } from "./job.js";

/** What was trained on, comparable between languages. */
interface Trained {
  groupId: string;
  tokens: number[];
  crc32c: string[];
  rewards: number[];
}

/** Trains the whole job and returns its ledger. */
export async function train(job: Job): Promise<Record<string, unknown>> {
  const { runId, steps } = job;
  const total = steps * BATCH;
  const trained: Trained[] = [];
  let added = 0;
  const hooks = await TrainerHooks.open({
    ...job,
    config: RunConfig.fromPartial({
      switch: { enableSwitch: true },
      policy: "verl",
      trainBatchSize: BATCH,
      parameterSyncStep: MINI_BATCHES,
      miniBatchSize: BATCH / MINI_BATCHES,
      totalTrainingSteps: BigInt(steps),
      hybridGpus: 1,
      standaloneGpus: 1,
      partition: PARTITION,
      numWarmupBatches: 1,
      groupSize: GROUP_SIZE,
      maxResponseTokens: BigInt(MAX_TOKENS),
    }),
    bufferConfig: BufferConfig.fromPartial({
      partitions: [{ name: PARTITION, defaultGroupSize: GROUP_SIZE }],
      trainBatchSize: BATCH,
    }),
    weightsOf: (version) => Buffer.alloc(WEIGHT_BYTES, Number(version % 251n)),
  });

  /** The next prompts of the job; with the last of them supply ends. */
  async function add(step: bigint, wanted: number): Promise<void> {
    const groups = Array.from({ length: Math.min(wanted, total - added) }, (_, at): GroupSpec => groupOf(added + at));
    added += groups.length;
    await hooks.add(step, groups, added === total);
  }

  const incarnation = async (): Promise<string> =>
    (await hooks.buffer.call(ReplayBufferService.getRun, GetRunRequest.fromPartial({ runId }))).incarnation;

  let finished = false;
  try {
    const first = await incarnation();
    await add(hooks.nextStep, hooks.warmupGroups);
    for (let step = hooks.nextStep; step <= BigInt(steps); step++) {
      await hooks.stepBegin(step);
      await add(step, BATCH);
      tell({ at: "added", step: Number(step) });
      await hooks.prepareStep(step);
      for (let miniBatch = 0; miniBatch < MINI_BATCHES; miniBatch++) {
        await hooks.miniBatch(step, miniBatch, BATCH / MINI_BATCHES, async (batch) => void trained.push(...read(batch)));
      }
      await hooks.stepEnd(step);
      tell({ at: "trained", step: Number(step) });
    }
    const request = GetLedgerRequest.fromPartial({ runId, partition: PARTITION });
    const ledger = await hooks.buffer.call(ReplayBufferService.getLedger, request);
    finished = true;
    return {
      // Numbers here are far below 2**53; what is not goes through String.
      added: Number(ledger.added),
      committed: Number(ledger.committed),
      evicted: Number(ledger.evicted),
      groups: trained.sort((one, other) => (one.groupId < other.groupId ? -1 : 1)),
      lends: hooks.lends,
      restarted: (await incarnation()) !== first,
    };
  } finally {
    await hooks.close(finished);
  }
}

function* read({ groups, payloads }: Batch): Generator<Trained> {
  const rest = payloads.values();
  for (const group of groups) {
    const trained: Trained = { groupId: group.groupId, tokens: [], crc32c: [], rewards: [] };
    for (const output of group.trajectories.flatMap((one) => one.outputs)) {
      const data = rest.next().value as Uint8Array;
      const tokenIds = unpackTokens(data);
      const length = output.segments.reduce((sum, segment) => sum + segment.tokens, 0n);
      if (BigInt(tokenIds.length) !== length || output.rewards["reward"] !== rewardOf(tokenIds)) {
        throw new Error(`${group.groupId}: the bytes are not those of its segments and rewards`);
      }
      trained.tokens.push(tokenIds.length);
      trained.crc32c.push(crc32c(data).toString(16).padStart(8, "0"));
      trained.rewards.push(rewardOf(tokenIds));
    }
    yield trained;
  }
}
