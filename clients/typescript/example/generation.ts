/**
 * One output of the engine controller.
 *
 * Invariant: whatever is cut, what was generated is kept and continued; the segments add up to the output.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import {
  type Delta,
  EngineControllerService,
  FinishReason,
  GenerateRequest,
  type OutputSegment,
} from "../gen/turnout/engine/v1/engine.js";
import { type Link, TurnoutError } from "../src/index.js";
import { MAX_TOKENS, PARTITION } from "./job.js";

export interface Trajectory {
  runId: string;
  groupId: string;
  index: number;
  attempt: number;
  prompt: number[];
}

export interface Generation {
  tokenIds: number[];
  segments: OutputSegment[];
}

const OUTAGE_MS = 90_000;
const DEADLINE_MS = 600_000;

/** Generates to the end, over restarts of the controller. */
export async function generate(engine: Link, trajectory: Trajectory, outages: { count: number }): Promise<Generation> {
  const output: Generation = { tokenIds: [], segments: [] };
  let heard = performance.now();
  for (let tries = 0; ; tries++) {
    try {
      for await (const { event } of engine.stream(
        EngineControllerService.generate,
        requestOf(trajectory, output, tries),
        DEADLINE_MS,
      )) {
        heard = performance.now();
        if (event?.$case === "delta") take(output, event.value);
        if (event?.$case !== "done") continue;
        if (event.value.rest) take(output, event.value.rest);
        output.segments = event.value.segments;
        if (event.value.finishReason !== FinishReason.FINISH_REASON_ABORT) return output;
      }
    } catch (error) {
      const away = error instanceof TurnoutError && [status.UNAVAILABLE, status.CANCELLED].includes(error.code);
      if (!away || performance.now() - heard > OUTAGE_MS) throw error;
      outages.count++;
      await sleep(250);
    }
    // What is continued begins a segment of its own.
    const last = output.segments.at(-1);
    if (last) last.continued = true;
  }
}

function requestOf(trajectory: Trajectory, output: Generation, tries: number): GenerateRequest {
  const { runId, groupId, index, attempt, prompt } = trajectory;
  return GenerateRequest.fromPartial({
    runId,
    requestId: `${groupId}/${index}/${attempt}/${tries}`,
    joinKey: { partition: PARTITION, groupId, trajectory: index, attempt },
    sessionId: groupId,
    promptTokenIds: prompt,
    outputTokenIds: output.tokenIds,
    outputSegments: output.segments,
    maxTokens: BigInt(MAX_TOKENS),
    // The same in every language, so that their outputs can be compared.
    sampling: { seed: BigInt(index) },
    deltaTokens: 32,
    deltaInterval: { seconds: 0n, nanos: 100_000_000 },
  });
}

function take(output: Generation, delta: Delta): void {
  if (delta.tokenIds.length === 0) return;
  const last = output.segments.at(-1);
  if (last === undefined || delta.newSegment || last.continued) {
    if (last) last.continued = true;
    output.segments.push({ tokens: 0n, weightVersion: delta.weightVersion, replicaId: delta.replicaId, continued: false });
  }
  const segment = output.segments.at(-1) as OutputSegment;
  segment.tokens += BigInt(delta.tokenIds.length);
  output.tokenIds.push(...delta.tokenIds);
}
