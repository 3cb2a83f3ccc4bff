/** The job that the programs of all languages run: its sizes, prompts and seeds. Change it in all of them, or in none. */
import { parseArgs } from "node:util";
import type { GroupSpec } from "../gen/turnout/buffer/v1/buffer.js";
import { GroupSpec as Spec } from "../gen/turnout/buffer/v1/buffer.js";
import { packTokens, TOKENS } from "../src/index.js";

export const PARTITION = "train";
export const GROUP_SIZE = 2;
export const BATCH = 4;
export const MINI_BATCHES = 2;
export const MAX_TOKENS = 256;
export const WEIGHT_BYTES = 1 << 20;

export interface Job {
  runId: string;
  steps: number;
  buffer: string;
  engine: string;
  scheduler: string;
}

/** Reads the command line. */
export function jobOf(argv: string[]): Job {
  const text = { type: "string" } as const;
  const options = { run: text, steps: text, buffer: text, engine: text, scheduler: text };
  const { run, steps, buffer, engine, scheduler } = parseArgs({ args: argv, options }).values;
  return {
    runId: run ?? "typescript",
    steps: Number(steps ?? 4),
    buffer: buffer ?? "127.0.0.1:50051",
    engine: engine ?? "127.0.0.1:50052",
    scheduler: scheduler ?? "127.0.0.1:50053",
  };
}

/** Returns the prompt of the number-th group, from 0. */
export function groupOf(number: number): GroupSpec {
  return Spec.fromPartial({
    groupId: `group-${String(number).padStart(3, "0")}`,
    groupSize: GROUP_SIZE,
    prompt: { source: { $case: "inline", value: packTokens([1000 + number, 7, 11]) }, contentType: TOKENS },
    tags: { number: String(number) },
  });
}

/** Returns the reward of an output: something that depends on every token of it. */
export function rewardOf(tokenIds: readonly number[]): number {
  return (tokenIds.reduce((sum, token) => sum + token, 0) % 1000) / 1000;
}

/** Prints one JSON line for whoever runs this program. */
export function tell(line: Record<string, unknown>): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}
