/**
 * Payload bytes to and from the buffer's own store.
 *
 * Invariants: what is returned has the size and CRC32C its reference names; a torn download goes on at the byte it had
 * come to; a torn upload begins anew, and the bytes of the first are dropped by the buffer when its lease ends.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import {
  type ClaimToken,
  GetPayloadsRequest,
  type PayloadRef,
  PutPayloadRequest,
  ReplayBufferService,
} from "../gen/turnout/buffer/v1/buffer.js";
import { crc32c } from "./crc32c.js";
import { TurnoutError } from "./errors.js";
import type { Link } from "./link.js";

/** Payloads up to this many bytes travel inside messages. */
export const INLINE_BYTES = 256 * 1024;

const CHUNK_BYTES = 2 ** 20;
const DEADLINE_MS = 120_000;
const ATTEMPTS = 20;

/** What gives the right to read: a sample lease, or a worker's claim. */
export type Right = { leaseId: string } | { claim: ClaimToken };

/** Uploads one payload and returns the reference to name in a trajectory. */
export async function putPayload(buffer: Link, runId: string, data: Uint8Array): Promise<PayloadRef> {
  function* frames(): Generator<PutPayloadRequest> {
    yield { frame: { $case: "header", value: { runId, size: BigInt(data.length) } } };
    for (let at = 0; at < data.length; at += CHUNK_BYTES) {
      yield { frame: { $case: "chunk", value: Buffer.from(data.subarray(at, at + CHUNK_BYTES)) } };
    }
    yield { frame: { $case: "end", value: { crc32c: crc32c(data) } } };
  }
  const { ref } = await repeat(() => buffer.upload(ReplayBufferService.putPayload, frames(), DEADLINE_MS));
  if (ref === undefined) throw new TurnoutError(status.INTERNAL, "", "the buffer answered without a reference");
  return ref;
}

/** Downloads payloads, in the order of their references. */
export async function getPayloads(
  buffer: Link,
  runId: string,
  right: Right,
  refs: readonly PayloadRef[],
): Promise<Buffer[]> {
  if (refs.length === 0) return [];
  const parts: Buffer[][] = refs.map(() => []);
  let received = 0n;
  let current = 0;
  await repeat(async () => {
    const request = GetPayloadsRequest.fromPartial({ runId, ...right, refs: [...refs], resumeAt: received });
    for await (const { frame } of buffer.stream(ReplayBufferService.getPayloads, request, DEADLINE_MS)) {
      if (frame?.$case === "header") current = frame.value.refIndex;
      if (frame?.$case === "chunk") {
        parts[current]?.push(frame.value);
        received += BigInt(frame.value.length);
      }
    }
  });
  return refs.map((ref, at) => {
    const data = Buffer.concat(parts[at] ?? []);
    if (BigInt(data.length) !== ref.size || crc32c(data) !== ref.crc32c) {
      throw new TurnoutError(status.DATA_LOSS, "CRC_MISMATCH", `payload ${ref.id} did not arrive whole`);
    }
    return data;
  });
}

async function repeat<T>(work: () => Promise<T>): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof TurnoutError && error.retryable) || attempt === ATTEMPTS) throw error;
      await sleep(Math.min(100 * attempt, 2_000));
    }
  }
}
