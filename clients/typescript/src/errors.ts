/**
 * What a call that did not answer OK says: a canonical code, and the reason the services put into google.rpc.ErrorInfo.
 *
 * Invariant: whatever a peer or a proxy sends, an error is made of it; details that cannot be read are left out.
 */
import { type ServiceError, status } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo } from "../gen/google/rpc/error_details.js";
import { Status } from "../gen/google/rpc/status.js";
import type { ItemOutcome } from "../gen/turnout/buffer/v1/buffer.js";

const DOMAIN = "turnout";
const TYPE = "type.googleapis.com/google.rpc.";

/** A call, or one item of a batch, that was refused. */
export class TurnoutError extends Error {
  constructor(
    /** Canonical gRPC code. */
    readonly code: status,
    /** UPPER_SNAKE reason; empty if a service did not answer (a connection that broke, a deadline). */
    readonly reason: string,
    message: string,
    /** Offending fields and values. */
    readonly metadata: Readonly<Record<string, string>> = {},
    /** Milliseconds after which the service wants to be asked again, if it said so. */
    readonly retryAfterMs?: number,
  ) {
    super(`${status[code] ?? code}${reason ? ` / ${reason}` : ""}: ${message}`);
    this.name = "TurnoutError";
  }

  /** Whether the same call may be repeated: the service is away, starting or draining. */
  get retryable(): boolean {
    return this.code === status.UNAVAILABLE;
  }
}

/** Reads an error of grpc-js with its details. */
export function fromServiceError(error: ServiceError): TurnoutError {
  let reason = "";
  let metadata: Record<string, string> = {};
  let retryAfterMs: number | undefined;
  for (const bytes of error.metadata?.get("grpc-status-details-bin") ?? []) {
    try {
      for (const detail of Status.decode(bytes as Buffer).details) {
        if (detail.typeUrl === `${TYPE}ErrorInfo`) {
          const info = ErrorInfo.decode(detail.value);
          if (info.domain === DOMAIN) ({ reason, metadata } = info);
        } else if (detail.typeUrl === `${TYPE}RetryInfo`) {
          const delay = RetryInfo.decode(detail.value).retryDelay;
          if (delay) retryAfterMs = Number(delay.seconds) * 1000 + delay.nanos / 1e6;
        }
      }
    } catch {
      // Not ours: the code and the message stay.
    }
  }
  return new TurnoutError(error.code, reason, error.details || error.message, metadata, retryAfterMs);
}

/** Returns the error of one item of a batch, or undefined if it was taken. */
export function itemError(outcome: ItemOutcome): TurnoutError | undefined {
  if (outcome.code === status.OK) return undefined;
  return new TurnoutError(outcome.code, outcome.reason, outcome.message, outcome.metadata);
}
