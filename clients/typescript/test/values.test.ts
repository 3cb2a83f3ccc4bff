/** H58: numbers, enum values and checksums, without a service. */
import assert from "node:assert/strict";
import test from "node:test";
import { Metadata, type ServiceError, status } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo } from "../gen/google/rpc/error_details.js";
import { Status } from "../gen/google/rpc/status.js";
import { GetRunResponse, GroupState, ListGroupsRequest, Segment, WaitForSampleableResponse } from "../gen/turnout/buffer/v1/buffer.js";
import { crc32c, duration, fromServiceError, milliseconds, packTokens, unpackTokens } from "../src/index.js";

const BOUNDARIES = [0n, -1n, 2n ** 31n, 2n ** 53n, 2n ** 53n + 1n, 2n ** 63n - 1n, -(2n ** 63n)];

test("64-bit numbers come back exactly, on the wire and as JSON", () => {
  for (const number of BOUNDARIES) {
    const segment = Segment.fromPartial({ tokens: number, weightVersion: number });
    const back = Segment.decode(Segment.encode(segment).finish());
    assert.equal(back.tokens, number);
    assert.equal(back.weightVersion, number);
    const json = Segment.toJSON(segment) as Record<string, unknown>;
    // The JSON mapping of protobuf: a string, which JSON.parse does not round.
    assert.equal(json["weightVersion"], number.toString());
    assert.equal(Segment.fromJSON(JSON.parse(JSON.stringify(json))).weightVersion, number);
  }
});

test("absent differs from zero", () => {
  assert.equal(Segment.decode(Segment.encode(Segment.fromPartial({})).finish()).weightVersion, undefined);
  assert.equal(Segment.decode(Segment.encode(Segment.fromPartial({ weightVersion: 0n })).finish()).weightVersion, 0n);
});

test("an enum value of a newer service is kept as its number", () => {
  const newer = 99 as GroupState;
  const bytes = ListGroupsRequest.encode(ListGroupsRequest.fromPartial({ states: [newer] })).finish();
  const back = ListGroupsRequest.decode(bytes);
  assert.deepEqual(back.states, [99]);
  assert.equal(GroupState[newer], undefined);
  assert.deepEqual(ListGroupsRequest.encode(back).finish(), bytes);
});

test("an event and a field of a newer service are passed over", () => {
  // Field 15 of the event's message, and field 900 of another, both as bytes.
  const event = WaitForSampleableResponse.decode(Buffer.from([0x7a, 0x01, 0x61]));
  assert.equal(event.event, undefined);
  const run = GetRunResponse.decode(Buffer.concat([Buffer.from([0x12, 0x01, 0x78]), Buffer.from([0xa2, 0x38, 0x01, 0x61])]));
  assert.equal(run.incarnation, "x");
});

test("durations and token ids come back", () => {
  for (const ms of [0, 1, 1_500, 86_400_000, 0.25]) assert.equal(milliseconds(duration(ms)), ms);
  const ids = [0, 1, 2 ** 31 - 1, -1];
  assert.deepEqual(unpackTokens(packTokens(ids)), ids);
  assert.throws(() => unpackTokens(Buffer.alloc(5)), RangeError);
});

test("CRC32C is Castagnoli's, in parts too", () => {
  // RFC 3720, B.4.
  assert.equal(crc32c(Buffer.alloc(32)), 0x8a9136aa);
  assert.equal(crc32c(Buffer.from("123456789")), 0xe3069283);
  assert.equal(crc32c(Buffer.from("6789"), crc32c(Buffer.from("12345"))), 0xe3069283);
});

test("details that cannot be read cost only themselves", () => {
  const error = (bytes: Buffer): ServiceError => {
    const metadata = new Metadata();
    metadata.set("grpc-status-details-bin", bytes);
    return Object.assign(new Error("x"), { code: status.NOT_FOUND, details: "no such run", metadata });
  };
  assert.equal(fromServiceError(error(Buffer.from("\xff\xff\xff"))).reason, "");
  const type = "type.googleapis.com/google.rpc.";
  const info = ErrorInfo.encode({ reason: "R", domain: "turnout", metadata: { a: "b" } }).finish();
  const retry = RetryInfo.encode({ retryDelay: { seconds: 1n, nanos: 500_000_000 } }).finish();
  const whole = Status.encode({
    code: 5,
    message: "",
    details: [
      { typeUrl: `${type}ErrorInfo`, value: Buffer.from(info) },
      { typeUrl: `${type}RetryInfo`, value: Buffer.from(retry) },
    ],
  }).finish();
  const read = fromServiceError(error(Buffer.from(whole)));
  assert.equal(read.reason, "R");
  assert.deepEqual({ ...read.metadata }, { a: "b" });
  assert.equal(read.retryAfterMs, 1_500);
});
