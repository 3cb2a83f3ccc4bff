/** Weight updates through the controller: open, send, acknowledge. Invariant: an update that was opened is closed. */
import {
  AbortWeightUpdateRequest,
  BeginWeightUpdateRequest,
  CommitWeightUpdateRequest,
  EngineControllerService,
  ReplicaRole,
  ReportVacatedRequest,
  UpdateKind,
  type UpdateWeightsRequest,
} from "../gen/turnout/engine/v1/engine.js";
import { crc32c, type Link } from "../src/index.js";
import { WEIGHT_BYTES } from "./job.js";

export interface Target {
  runId: string;
  epoch: bigint;
  role: ReplicaRole;
  /** Empty: all of the role. */
  replicaIds: string[];
  version: bigint;
  allowOlder: boolean;
}

/** Brings a version to replicas; returns the seconds it took. */
export async function install(engine: Link, target: Target): Promise<number> {
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
    await engine.upload(EngineControllerService.updateWeights, frames(target, updateId), 60_000);
    if (hybrid) {
      const vacated = wave.flatMap(({ ranks }) => ranks.map(({ gpu }) => ({ gpu, bytesFree: BigInt(80) << 30n })));
      await engine.call(
        EngineControllerService.reportVacated,
        ReportVacatedRequest.fromPartial({ runId, epoch, updateId, vacated }),
      );
    }
    const acks = wave.map(({ replicaId }) => ({ replicaId, ok: true }));
    await engine.call(
      EngineControllerService.commitWeightUpdate,
      CommitWeightUpdateRequest.fromPartial({ runId, epoch, updateId, acks }),
    );
  } catch (error) {
    const request = AbortWeightUpdateRequest.fromPartial({ runId, epoch, updateId });
    await engine.call(EngineControllerService.abortWeightUpdate, request);
    throw error;
  }
  return (performance.now() - began) / 1000;
}

function* frames({ runId, epoch, version }: Target, updateId: string): Generator<UpdateWeightsRequest> {
  const weights = Buffer.alloc(WEIGHT_BYTES, Number(version % 251n));
  const header = { runId, epoch, updateId, replicaIds: [], size: BigInt(weights.length), infoJson: "", waveIndex: 0 };
  yield { frame: { $case: "header", value: header } };
  const half = weights.length / 2;
  yield { frame: { $case: "chunk", value: weights.subarray(0, half) } };
  yield { frame: { $case: "chunk", value: weights.subarray(half) } };
  yield { frame: { $case: "end", value: { crc32c: crc32c(weights) } } };
}
