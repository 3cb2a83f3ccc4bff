/** Standalone replicas that come back without weights while a trainer waits, against a controller that is scripted. */
import assert from "node:assert/strict";
import { once } from "node:events";
import test from "node:test";
import { promisify } from "node:util";
import { Server, ServerCredentials, status, type UntypedServiceImplementation } from "@grpc/grpc-js";
import {
  AbortWeightUpdateResponse,
  BeginWeightUpdateResponse,
  type BeginWeightUpdateRequest,
  type CommitWeightUpdateRequest,
  CommitWeightUpdateResponse,
  EngineControllerService,
  OutcomeKind,
  Replica,
  ReplicaHealth,
  ReplicaRole,
  UpdateWeightsResponse,
  WatchReplicasResponse,
} from "../gen/turnout/engine/v1/engine.js";
import { Link } from "../src/index.js";
import { whileRestoring } from "../src/restoring.js";

const role = ReplicaRole.REPLICA_ROLE_STANDALONE;
const target = { runId: "r", epoch: 1n, role, replicaIds: [], version: 4n, allowOlder: false };

function replica(replicaId: string, weightVersion?: bigint, health = ReplicaHealth.REPLICA_HEALTH_HEALTHY): Replica {
  return Replica.fromPartial({ spec: { replicaId, role }, health, ...(weightVersion === undefined ? {} : { weightVersion }) });
}

/**
 * A controller with these replicas; `updated` resolves with the replicas that got weights. The first move reaches none of
 * `missed`, and the first commit fails if there are any.
 */
async function controller(
  replicas: Replica[],
  work: (engine: Link, updated: Promise<string[]>) => Promise<void>,
  missed: string[] = [],
) {
  let told: (replicaIds: string[]) => void = () => undefined;
  const updated = new Promise<string[]>((resolve) => (told = resolve));
  let begun: string[] = [];
  const calls = {
    watchReplicas: (call: any) => call.write(WatchReplicasResponse.fromPartial({ changed: replicas })),
    beginWeightUpdate: ({ request }: { request: BeginWeightUpdateRequest }, answer: any) => {
      begun = request.selector?.replicaIds ?? [];
      assert.equal(request.weightVersion, 4n);
      const wave = begun.map((replicaId) => ({ replicaId }));
      answer(null, BeginWeightUpdateResponse.fromPartial({ updateId: "u", wave }));
    },
    updateWeights: (call: any, answer: any) => {
      call.on("data", () => undefined);
      const kind = OutcomeKind.OUTCOME_KIND_FAILED;
      const outcomes = missed.map((replicaId) => ({ replicaId, kind }));
      call.on("end", () => answer(null, UpdateWeightsResponse.fromPartial({ operation: { outcomes } })));
    },
    abortWeightUpdate: (_: unknown, answer: any) => answer(null, AbortWeightUpdateResponse.fromPartial({})),
    commitWeightUpdate: ({ request }: { request: CommitWeightUpdateRequest }, answer: any) => {
      const refused = request.acks.filter(({ ok }) => !ok).map(({ replicaId }) => replicaId);
      assert.deepEqual(refused, missed);
      if (missed.length > 0) {
        missed = [];
        answer({ code: status.DATA_LOSS, details: "not all took them" });
        return;
      }
      replicas = replicas.map((one) => (begun.includes(one.spec?.replicaId ?? "") ? { ...one, weightVersion: 4n } : one));
      answer(null, CommitWeightUpdateResponse.fromPartial({ complete: true }));
      told(begun);
    },
  };
  const server = new Server();
  server.addService(EngineControllerService, calls as unknown as UntypedServiceImplementation);
  const port = await promisify(server.bindAsync.bind(server))("127.0.0.1:0", ServerCredentials.createInsecure());
  const engine = new Link(`127.0.0.1:${port}`, {});
  try {
    await work(engine, updated);
  } finally {
    engine.close();
    server.forceShutdown();
  }
}

test("a wait brings weights to the healthy replicas that lack them", async () => {
  const dead = replica("s2", undefined, ReplicaHealth.REPLICA_HEALTH_DEAD);
  await controller([replica("s0", 4n), replica("s1"), dead, replica("s3", 3n)], async (engine, updated) => {
    const wait = updated.then(() => "groups");
    assert.equal(await whileRestoring(engine, target, () => Buffer.from("weights"), wait), "groups");
    assert.deepEqual(await updated, ["s1", "s3"]);
  });
});

test("what the trainer's own function throws ends the wait", async () => {
  await controller([replica("s0")], async (engine) => {
    const never = new Promise<void>(() => undefined);
    const failing = whileRestoring(engine, target, () => Promise.reject(new Error("no such version")), never);
    await assert.rejects(failing, /no such version/);
  });
});

test("a wait that is over at once moves nothing", async () => {
  await controller([replica("s0")], async (engine, updated) => {
    let moved = false;
    void updated.then(() => (moved = true));
    const ticks = once(process, "never", { signal: AbortSignal.timeout(50) }).catch(() => "groups");
    assert.equal(await whileRestoring(engine, target, () => Buffer.alloc(1), ticks as Promise<string>), "groups");
    assert.equal(moved, false);
  });
});

test("a replica that did not get all bytes is not acknowledged, and tried again", async () => {
  const replicas = [replica("s0"), replica("s1")];
  await controller(
    replicas,
    async (engine, updated) => {
      const wait = updated.then(() => "groups");
      assert.equal(await whileRestoring(engine, target, () => Buffer.from("weights"), wait), "groups");
      assert.deepEqual(await updated, ["s0", "s1"]);
    },
    ["s1"],
  );
});
