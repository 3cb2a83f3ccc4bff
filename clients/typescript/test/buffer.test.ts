/** H58: what a live buffer answers. Runs where TURNOUT_TEST_BUFFER names one. */
import assert from "node:assert/strict";
import { randomBytes, randomUUID } from "node:crypto";
import { createServer, type Socket } from "node:net";
import test from "node:test";
import { Metadata, status } from "@grpc/grpc-js";
import {
  AddGroupsRequest,
  ClaimGroupsRequest,
  CreateRunRequest,
  FinishStreamRequest,
  type FinishStreamResponse,
  FinishTrajectoriesRequest,
  GetLedgerRequest,
  GetRunRequest,
  GetSampleableCountRequest,
  GroupState,
  ListGroupsRequest,
  ReplayBufferService,
  SampleRequest,
  WaitForSampleableRequest,
  WaitOutcome,
  WatchDepthRequest,
} from "../gen/turnout/buffer/v1/buffer.js";
import { duration, getPayloads, itemError, Link, putPayload, TurnoutError, waitFor } from "../src/index.js";

const target = process.env["TURNOUT_TEST_BUFFER"];
const skip = target ? false : "TURNOUT_TEST_BUFFER is not set";
const buffer = new Link(target ?? "127.0.0.1:1");
const partition = "train";
const refill = async (): Promise<void> => assert.fail("no refill is due");

async function newRun(groups = 0): Promise<string> {
  const runId = `ts-${randomUUID()}`;
  await buffer.call(ReplayBufferService.createRun, CreateRunRequest.fromPartial({ runId }));
  if (groups) {
    const specs = Array.from({ length: groups }, (_, at) => ({ groupId: `g${at}` }));
    const request = AddGroupsRequest.fromPartial({ runId, partition, step: 1n, groups: specs });
    await buffer.call(ReplayBufferService.addGroups, request);
  }
  return runId;
}

async function refused(work: Promise<unknown>, code: status, reason?: string): Promise<TurnoutError> {
  try {
    await work;
  } catch (error) {
    assert.ok(error instanceof TurnoutError, String(error));
    assert.equal(error.code, code, error.message);
    if (reason !== undefined) assert.equal(error.reason, reason);
    return error;
  }
  return assert.fail("it was not refused");
}

function wait(runId: string, more: object, maxWaitMs: number) {
  return waitFor(
    buffer,
    ReplayBufferService.waitForSampleable,
    (left) => WaitForSampleableRequest.fromPartial({ runId, partition, step: 1n, maxWait: duration(left), ...more }),
    maxWaitMs,
    { refill },
  );
}

test.after(() => buffer.close());

test("steps and token counts beyond 2**53 are kept exactly", { skip }, async () => {
  const runId = await newRun();
  const born = 2n ** 53n + 1n;
  const tokens = 2n ** 62n - 1n;
  const groups = [{ groupId: "big" }];
  await buffer.call(
    ReplayBufferService.addGroups,
    AddGroupsRequest.fromPartial({ runId, partition, step: born, groups }),
  );
  const outputs = [{ promptTokens: 2n ** 53n + 3n, segments: [{ tokens, weightVersion: born - 1n }] }];
  const { outcomes } = await buffer.call(
    ReplayBufferService.finishTrajectories,
    FinishTrajectoriesRequest.fromPartial({ runId, partition, results: [{ groupId: "big", outputs }] }),
  );
  assert.equal(itemError(outcomes[0]!), undefined);
  const page = await buffer.call(ReplayBufferService.listGroups, ListGroupsRequest.fromPartial({ runId, partition }));
  const [group] = page.groups;
  assert.equal(group?.bornStep, born);
  assert.equal(group?.trajectories[0]?.outputs[0]?.segments[0]?.tokens, tokens);
  assert.equal(group?.trajectories[0]?.outputs[0]?.segments[0]?.weightVersion, born - 1n);
  assert.equal(group?.trajectories[0]?.outputs[0]?.promptTokens, 2n ** 53n + 3n);
});

test("boundary numbers are answered or refused by name, never rounded or wrapped", { skip }, async () => {
  const runId = await newRun();
  assert.equal((await wait(runId, { target: 0n }, 5_000)).outcome, WaitOutcome.WAIT_OUTCOME_REACHED);
  await refused(wait(runId, { target: -1n }, 1_000), status.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE");
  assert.equal((await wait(runId, { target: 1n, maxWait: duration(0) }, 5_000)).outcome, WaitOutcome.WAIT_OUTCOME_TIMED_OUT);
  await refused(wait(runId, { target: 1n, maxWait: duration(-1) }, 1_000), status.INVALID_ARGUMENT);
  // The longest Duration there is: capped, not overflowed.
  const longest = { seconds: 315_576_000_000n, nanos: 0 };
  assert.equal((await wait(runId, { target: 0n, maxWait: longest }, 5_000)).outcome, WaitOutcome.WAIT_OUTCOME_REACHED);
  const add = (step: bigint) =>
    buffer.call(
      ReplayBufferService.addGroups,
      AddGroupsRequest.fromPartial({ runId, partition, step, groups: [{ groupId: "x" }] }),
    );
  await refused(add(-1n), status.INVALID_ARGUMENT);
});

test("an error carries code, reason and metadata", { skip }, async () => {
  const request = GetRunRequest.fromPartial({ runId: "no such run" });
  await refused(buffer.call(ReplayBufferService.getRun, request), status.NOT_FOUND, "RUN_NOT_FOUND");
  const runId = await newRun();
  const epoch = { runId, partition, epoch: 7n, step: 1n, groups: [{ groupId: "x" }] };
  const error = await refused(
    buffer.call(ReplayBufferService.addGroups, AddGroupsRequest.fromPartial(epoch)),
    status.FAILED_PRECONDITION,
    "UNKNOWN_EPOCH",
  );
  assert.ok(Object.keys(error.metadata).length > 0, "the metadata names the field");
});

test("an enum value this service does not know is refused or matches nothing", { skip }, async () => {
  const runId = await newRun(1);
  const request = ListGroupsRequest.fromPartial({ runId, partition, states: [99 as GroupState] });
  const answered = await buffer.call(ReplayBufferService.listGroups, request).catch((error: unknown) => error);
  if (answered instanceof TurnoutError) assert.equal(answered.code, status.INVALID_ARGUMENT);
  else assert.deepEqual((answered as { groups: unknown[] }).groups, []);
});

test("a deadline before max_wait is TIMED_OUT by the service, without a deadline error", { skip }, async () => {
  const runId = await newRun(1);
  const request = WaitForSampleableRequest.fromPartial({ runId, partition, step: 1n, target: 1n });
  const seen: string[] = [];
  for await (const { event } of buffer.stream(ReplayBufferService.waitForSampleable, request, 2_000)) {
    if (event) seen.push(event.$case);
    if (event?.$case === "done") assert.equal(event.value.outcome, WaitOutcome.WAIT_OUTCOME_TIMED_OUT);
  }
  assert.equal(seen.at(-1), "done");
});

test("H57: a listener that stays silent costs a deadline, not for ever", async () => {
  const accepted: Socket[] = [];
  const silent = createServer((socket) => void accepted.push(socket));
  await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
  const { port } = silent.address() as { port: number };
  const link = new Link(`127.0.0.1:${port}`);
  try {
    const call = link.call(ReplayBufferService.getRun, GetRunRequest.fromPartial({ runId: "x" }), { totalMs: 1_000 });
    const error = await call.catch((reason: unknown) => reason);
    assert.ok(error instanceof TurnoutError);
    assert.ok([status.DEADLINE_EXCEEDED, status.UNAVAILABLE].includes(error.code), error.message);
  } finally {
    link.close();
    for (const socket of accepted) socket.destroy();
    silent.close();
  }
});

test("streams of each kind: results both ways, payloads up and down, depth", { skip }, async () => {
  const runId = await newRun(2);
  const depth: bigint[] = [];
  const watching = (async () => {
    const request = WatchDepthRequest.fromPartial({ runId, partition, step: 1n });
    for await (const message of buffer.stream(ReplayBufferService.watchDepth, request, 30_000)) {
      depth.push(message.depth?.sampleable ?? -1n);
      if (depth.at(-1) === 2n) return;
    }
  })();
  const { claims } = await buffer.call(
    ReplayBufferService.claimGroups,
    ClaimGroupsRequest.fromPartial({ runId, partition, workerId: "w", maxTrajectories: 2 }),
  );
  assert.equal(claims.length, 2);
  const large = randomBytes(3 * 2 ** 20 + 5);
  const ref = await putPayload(buffer, runId, large);
  assert.equal(ref.size, BigInt(large.length));

  const { path, requestSerialize, responseDeserialize } = ReplayBufferService.finishStream;
  const stream = buffer.client.makeBidiStreamRequest<FinishStreamRequest, FinishStreamResponse>(
    path,
    requestSerialize,
    responseDeserialize,
    new Metadata(),
    { deadline: new Date(Date.now() + 30_000) },
  );
  stream.write(FinishStreamRequest.fromPartial({ frame: { $case: "header", value: { runId, partition } } }));
  claims.forEach(({ token, groupId }, at) => {
    const outputs = [{ segments: [{ tokens: 5n }], payload: { source: { $case: "ref" as const, value: ref } } }];
    const inline = [{ segments: [{ tokens: 5n }], payload: { source: { $case: "inline" as const, value: Buffer.from("small") } } }];
    const results = [{ token, groupId, index: 0, outputs: at === 0 ? outputs : inline }];
    stream.write(FinishStreamRequest.fromPartial({ frame: { $case: "batch", value: { sequence: BigInt(at + 1), results } } }));
  });
  stream.end();
  const answered: bigint[] = [];
  for await (const message of stream as AsyncIterable<FinishStreamResponse>) {
    answered.push(message.sequence);
    for (const outcome of message.outcomes) assert.equal(itemError(outcome), undefined);
  }
  assert.deepEqual(answered, [1n, 2n]);
  await watching;

  const refs: Buffer[] = [];
  const groups: string[] = [];
  const request = SampleRequest.fromPartial({ runId, partition, step: 1n, batch: 2, maxWait: duration(5_000) });
  for await (const { event } of buffer.stream(ReplayBufferService.sample, request, 10_000)) {
    if (event?.$case === "groups") groups.push(...event.value.groups.map(({ groupId }) => groupId));
    if (event?.$case !== "done") continue;
    assert.equal(event.value.outcome, WaitOutcome.WAIT_OUTCOME_REACHED);
    const data = await getPayloads(buffer, runId, { leaseId: event.value.leaseId }, [ref]);
    refs.push(...data);
  }
  assert.deepEqual(groups, ["g0", "g1"]);
  assert.ok(refs[0]?.equals(large));
  const ledger = await buffer.call(ReplayBufferService.getLedger, GetLedgerRequest.fromPartial({ runId, partition }));
  assert.equal(ledger.added, 2n);
  const count = GetSampleableCountRequest.fromPartial({ runId, partition });
  assert.equal((await buffer.call(ReplayBufferService.getSampleableCount, count)).depth?.sampleable, 0n);
});
