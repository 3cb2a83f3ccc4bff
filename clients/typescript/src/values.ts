/** Values of the contract as a program has them: durations in milliseconds, token ids as bytes. Pure. */
import type { Duration } from "../gen/google/protobuf/duration.js";

/** Content type of token ids: little-endian int32. */
export const TOKENS = "application/x-turnout-int32";

/** Returns a Duration of `ms` milliseconds. */
export function duration(ms: number): Duration {
  const whole = Math.trunc(ms / 1000);
  return { seconds: BigInt(whole), nanos: Math.round((ms - whole * 1000) * 1e6) };
}

/** Returns the milliseconds of a Duration. */
export function milliseconds(value: Duration): number {
  return Number(value.seconds) * 1000 + value.nanos / 1e6;
}

/** Returns token ids as payload bytes. */
export function packTokens(tokenIds: readonly number[]): Buffer {
  const bytes = Buffer.alloc(4 * tokenIds.length);
  tokenIds.forEach((token, at) => bytes.writeInt32LE(token, 4 * at));
  return bytes;
}

/** Returns the token ids of payload bytes; throws RangeError if they are not whole. */
export function unpackTokens(bytes: Uint8Array): number[] {
  if (bytes.length % 4) throw new RangeError(`${bytes.length} bytes are no int32 token ids`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Array.from({ length: bytes.length / 4 }, (_, at) => view.getInt32(4 * at, true));
}
