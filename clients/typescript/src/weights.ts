/**
 * Weight updates through the controller: open, send, acknowledge.
 *
 * Invariants: an update that was opened is closed; a replica that did not get all bytes is not acknowledged.
 */
import {
  AbortWeightUpdateRequest,
  BeginWeightUpdateRequest,
  CommitWeightUpdateRequest,
  EngineControllerService,
  OutcomeKind,
  ReplicaRole,
  ReportVacatedRequest,
  UpdateKind,
  type UpdateWeightsRequest,
} from "../gen/turnout/engine/v1/engine.js";
import { crc32c } from "./crc32c.js";
import type { Link } from "./link.js";

/** Returns the bytes of a version, as the engines load them. */
export type WeightsOf = (version: bigint) => Uint8Array | Promise<Uint8Array>;

export interface Target {
  runId: string;
  epoch: bigint;
  role: ReplicaRole;
  /** Empty: all of the role. */
  replicaIds: string[];
  version: bigint;
  allowOlder: boolean;
}

const CHUNK_BYTES = 1 << 20;
const UPLOAD_MS = 600_000;

/** Brings a version to replicas; returns the seconds it took. */
export async function install(engine: Link, target: Target, weightsOf: WeightsOf): Promise<number> {
  const began = performance.now();
  const { runId, epoch, version } = target;
  const hybrid = target.role === ReplicaRole.REPLICA_ROLE_HYBRID;
  const { updateId, wave } = await engine.call(
    EngineControllerService.beginWeightUpdate,
    BeginWeightUpdateRequest.fromPartial({
      runId,
      epoch,
      selector: { replicaIds: target.replicaIds, roles: [target.role] },
      kind: hybrid ? UpdateKind.UPDATE_KIND_ASLEEP : UpdateKind.UPDATE_KIND_AWAKE,
      weightVersion: version,
      allowOlder: target.allowOlder,
    }),
  );
  try {
    const weights = await weightsOf(version);
    const sent = await engine.upload(EngineControllerService.updateWeights, frames(target, updateId, weights), UPLOAD_MS);
    const missed = (sent.operation?.outcomes ?? []).filter(({ kind }) => kind === OutcomeKind.OUTCOME_KIND_FAILED);
    if (hybrid) {
      // The trainer has let its own memory go before it calls: that is what a lend is.
      const vacated = wave.flatMap(({ ranks }) => ranks.map(({ gpu }) => ({ gpu, bytesFree: 0n })));
      await engine.call(
        EngineControllerService.reportVacated,
        ReportVacatedRequest.fromPartial({ runId, epoch, updateId, vacated }),
      );
    }
    const acks = wave.map(({ replicaId }) => ({ replicaId, ok: !missed.some((one) => one.replicaId === replicaId) }));
    await engine.call(
      EngineControllerService.commitWeightUpdate,
      CommitWeightUpdateRequest.fromPartial({ runId, epoch, updateId, acks }),
    );
  } catch (error) {
    const request = AbortWeightUpdateRequest.fromPartial({ runId, epoch, updateId });
    // The first error is the one that says whether to try again.
    await engine.call(EngineControllerService.abortWeightUpdate, request).catch(() => undefined);
    throw error;
  }
  return (performance.now() - began) / 1000;
}

function* frames({ runId, epoch }: Target, updateId: string, weights: Uint8Array): Generator<UpdateWeightsRequest> {
  const header = { runId, epoch, updateId, replicaIds: [], size: BigInt(weights.length), infoJson: "", waveIndex: 0, moveIndex: 0 };
  yield { frame: { $case: "header", value: header } };
  for (let at = 0; at < weights.length; at += CHUNK_BYTES) {
    yield { frame: { $case: "chunk", value: Buffer.from(weights.subarray(at, at + CHUNK_BYTES)) } };
  }
  yield { frame: { $case: "end", value: { crc32c: crc32c(weights) } } };
}
