/**
 * A trainer that lends its GPUs while it waits. Beside it: turnout up --run my-run --reference 1:1, and a worker, such as
 * examples/any_worker.py.
 *
 *     npm run build && node dist/example/any_trainer.js
 */
import { type GroupSpec, type Output, RunConfig as BufferConfig } from "../gen/turnout/buffer/v1/buffer.js";
import { RunConfig } from "../gen/turnout/scheduler/v1/scheduler.js";
import { TrainerHooks, unpackTokens } from "../src/index.js";

const [STEPS, BATCH, MINI_BATCHES, GROUP] = [5, 8, 4, 2];
const model = new Float32Array(32_000); // yours: here one weight per token
let prompts = 0;

function groups(count: number): GroupSpec[] {
  return Array.from({ length: count }, (): GroupSpec => {
    const text = `prompt ${prompts++}`;
    const prompt = { source: { $case: "inline" as const, value: Buffer.from(text) }, contentType: "" };
    return { groupId: text, groupSize: GROUP, prompt, tags: {}, promptId: "" };
  });
}

function train(outputs: Output[], payloads: Uint8Array[]): number {
  const rewards = outputs.map(({ rewards }) => rewards["reward"] as number);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  outputs.forEach((_, at) => {
    const step = 1e-3 * ((rewards[at] as number) - mean);
    for (const token of unpackTokens(payloads[at] as Uint8Array)) model[token] = (model[token] as number) + step;
  });
  return mean;
}

const hooks = await TrainerHooks.open({
  ...{ runId: "my-run", buffer: "127.0.0.1:50051", engine: "127.0.0.1:50052", scheduler: "127.0.0.1:50053" },
  config: RunConfig.fromPartial({
    ...{ switch: { enableSwitch: true }, totalTrainingSteps: BigInt(STEPS), hybridGpus: 1, standaloneGpus: 1 },
    ...{ trainBatchSize: BATCH, parameterSyncStep: MINI_BATCHES, miniBatchSize: BATCH / MINI_BATCHES },
  }),
  bufferConfig: BufferConfig.fromPartial({}),
  weightsOf: () => new Uint8Array(model.buffer.slice(0)),
});
let finished = false;
try {
  await hooks.add(hooks.nextStep, groups(hooks.warmupGroups));
  for (let step = hooks.nextStep; step <= BigInt(STEPS); step++) {
    await hooks.stepBegin(step);
    await hooks.add(step, groups(BATCH));
    await hooks.prepareStep(step); // waits until the GPUs are the trainer's again
    for (let miniBatch = 0; miniBatch < MINI_BATCHES; miniBatch++) {
      await hooks.miniBatch(step, miniBatch, BATCH / MINI_BATCHES, async ({ outputs, payloads }) => {
        console.log(`step ${step} mini-batch ${miniBatch}: reward ${train(outputs, payloads).toFixed(3)}`);
      });
    }
    await hooks.stepEnd(step); // moves weights, and may lend the GPUs
  }
  finished = true;
} finally {
  await hooks.close(finished);
}
