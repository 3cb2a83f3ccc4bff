/**
 * Weights for standalone replicas that came back without them, while the trainer waits for groups.
 *
 * Invariants: nothing is moved before the wait has lasted a moment, and none begins after its end; a replica that does not
 * take them is tried again and ends no wait.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import {
  EngineControllerService,
  type Replica,
  ReplicaHealth,
  ReplicaRole,
  WatchReplicasRequest,
} from "../gen/turnout/engine/v1/engine.js";
import { TurnoutError } from "./errors.js";
import type { Link } from "./link.js";
import { install, type Target, type WeightsOf } from "./weights.js";

/** A wait that is over sooner is none that weights should be moved in. */
const PATIENCE_MS = 500;
/** Between two times: a replica may die of its weights, or tell of others. */
const AGAIN_MS = 2_000;
/** A watch is begun anew after an hour, so that no call is without a deadline. */
const LONGEST_WATCH_MS = 3_600_000;
const PASSING = [
  status.UNAVAILABLE,
  status.ABORTED,
  status.DATA_LOSS,
  status.DEADLINE_EXCEEDED,
  status.FAILED_PRECONDITION,
  status.NOT_FOUND,
  status.CANCELLED,
];

/** Returns what `wait` does, and meanwhile brings `target.version` to standalone replicas that lack it. */
export async function whileRestoring<T>(
  engine: Link,
  target: Target,
  weightsOf: WeightsOf,
  wait: Promise<T>,
): Promise<T> {
  const ended = new AbortController();
  const restored = restore(engine, target, weightsOf, ended.signal);
  try {
    // What the trainer's own function throws must not wait for groups that may never come.
    return await Promise.race([wait, restored.then(() => wait)]);
  } finally {
    ended.abort();
    wait.catch(() => undefined);
    await restored.catch(() => undefined);
  }
}

async function restore(engine: Link, target: Target, weightsOf: WeightsOf, signal: AbortSignal): Promise<void> {
  for (let pause = PATIENCE_MS; !signal.aborted; pause = AGAIN_MS) {
    await sleep(pause, undefined, { signal }).catch(() => undefined);
    try {
      const replicaIds = await lacking(engine, target, signal);
      // None: the watch was ended, by the wait or by the controller.
      if (replicaIds.length > 0 && !signal.aborted) await install(engine, { ...target, replicaIds }, weightsOf);
    } catch (error) {
      if (!signal.aborted && !passes(error)) throw error;
    }
  }
}

/** Whether an error is that of engines or of a controller that is away, and none of the trainer's own. */
function passes(error: unknown): boolean {
  if (!(error instanceof TurnoutError) || error.reason === "STALE_EPOCH") return false;
  return error.reason === "PARTIAL" || PASSING.includes(error.code);
}

/** Waits until some replicas could serve the version and do not have it; their ids. */
async function lacking(engine: Link, { runId, version }: Target, signal: AbortSignal): Promise<string[]> {
  const replicas = new Map<string, Replica>();
  const request = WatchReplicasRequest.fromPartial({ runId });
  for await (const { changed, removed } of engine.stream(
    EngineControllerService.watchReplicas,
    request,
    LONGEST_WATCH_MS,
    signal,
  )) {
    for (const replica of changed) replicas.set(replica.spec?.replicaId ?? "", replica);
    for (const replicaId of removed) replicas.delete(replicaId);
    const found = [...replicas].filter(([, replica]) => lacks(replica, version)).map(([replicaId]) => replicaId);
    if (found.length > 0) return found.sort();
  }
  return [];
}

function lacks({ spec, health, updateId, weightVersion }: Replica, version: bigint): boolean {
  return (
    spec?.role === ReplicaRole.REPLICA_ROLE_STANDALONE &&
    health === ReplicaHealth.REPLICA_HEALTH_HEALTHY &&
    updateId === "" &&
    weightVersion !== version
  );
}
