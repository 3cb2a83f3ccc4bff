/**
 * A connection to one service, and calls on it.
 *
 * Invariants: every call has a deadline; a unary call is repeated while the service is UNAVAILABLE, with the same
 * request (so the same request_id) and within its total; a stream is never repeated here, since only its reader knows
 * where to go on (see waits.ts).
 */
import { setTimeout as sleep } from "node:timers/promises";
import {
  Client,
  type ClientReadableStream,
  Metadata,
  type ServiceError,
  status,
} from "@grpc/grpc-js";
import { fromServiceError, TurnoutError } from "./errors.js";
import { secured, type Security, securityFromEnvironment } from "./security.js";

export interface CallOptions {
  /** Milliseconds for all attempts together. Default 60 s. */
  totalMs?: number;
  /** Milliseconds for one attempt. Default 30 s. */
  attemptMs?: number;
}

/** What a caller needs of a method of the generated service definitions, such as `ReplayBufferService.getRun`. */
export interface Method<Req, Res> {
  readonly path: string;
  readonly requestSerialize: (request: Req) => Buffer;
  readonly responseDeserialize: (bytes: Buffer) => Res;
}

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 2_000;

/** A channel to one service. */
export class Link {
  readonly client: Client;

  /** TLS and the token are those of the environment, unless given; throws if a token would travel in the open. */
  constructor(
    readonly target: string,
    security: Security = securityFromEnvironment(),
  ) {
    const [channel, options, interceptors] = secured(target, security);
    this.client = new Client(target, channel, {
      ...options,
      interceptors,
      // A half-open peer is noticed within seconds, and no proxy cuts a silent wait.
      "grpc.keepalive_time_ms": 4_000,
      "grpc.keepalive_timeout_ms": 4_000,
      "grpc.keepalive_permit_without_calls": 0,
      // A service that restarts is found again soon after it is back.
      "grpc.initial_reconnect_backoff_ms": 100,
      "grpc.max_reconnect_backoff_ms": 2_000,
      "grpc.max_receive_message_length": 64 * 2 ** 20,
      "grpc.enable_http_proxy": 0,
    });
  }

  close(): void {
    this.client.close();
  }

  /** Makes a unary call; throws TurnoutError. */
  async call<Req, Res>(method: Method<Req, Res>, request: Req, options: CallOptions = {}): Promise<Res> {
    const end = performance.now() + (options.totalMs ?? 60_000);
    for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      try {
        const left = Math.max(0, end - performance.now());
        return await this.attempt(method, request, Math.min(options.attemptMs ?? 30_000, left));
      } catch (error) {
        const wait = Math.max(pause, error instanceof TurnoutError ? (error.retryAfterMs ?? 0) : 0);
        if (!(error instanceof TurnoutError && error.retryable) || performance.now() + wait >= end) throw error;
        await sleep(wait * (1 - 0.2 * Math.random()));
      }
    }
  }

  private attempt<Req, Res>(method: Method<Req, Res>, request: Req, ms: number): Promise<Res> {
    return new Promise((resolve, reject) => {
      this.client.makeUnaryRequest(
        method.path,
        method.requestSerialize,
        method.responseDeserialize,
        request,
        new Metadata(),
        { deadline: new Date(Date.now() + ms) },
        (error: ServiceError | null, response?: Res) => {
          if (error) reject(fromServiceError(error));
          else if (response === undefined) reject(new TurnoutError(status.INTERNAL, "", "no answer and no error"));
          else resolve(response);
        },
      );
    });
  }

  /** Yields the messages of a server stream; throws TurnoutError. Leaving the loop cancels the call, as `signal` does. */
  async *stream<Req, Res>(
    method: Method<Req, Res>,
    request: Req,
    deadlineMs: number,
    signal?: AbortSignal,
  ): AsyncGenerator<Res> {
    const call: ClientReadableStream<Res> = this.client.makeServerStreamRequest(
      method.path,
      method.requestSerialize,
      method.responseDeserialize,
      request,
      new Metadata(),
      { deadline: new Date(Date.now() + deadlineMs) },
    );
    const cancel = (): void => call.cancel();
    signal?.addEventListener("abort", cancel);
    if (signal?.aborted) cancel();
    try {
      for await (const message of call) yield message as Res;
    } catch (error) {
      throw fromServiceError(error as ServiceError);
    } finally {
      signal?.removeEventListener("abort", cancel);
      // Whoever leaves early is not interested in how the call ends.
      call.on("error", () => undefined);
      call.cancel();
    }
  }

  /** Sends frames on a client stream and returns the answer; throws TurnoutError. */
  upload<Req, Res>(method: Method<Req, Res>, frames: Iterable<Req>, deadlineMs: number): Promise<Res> {
    return new Promise((resolve, reject) => {
      const call = this.client.makeClientStreamRequest(
        method.path,
        method.requestSerialize,
        method.responseDeserialize,
        new Metadata(),
        { deadline: new Date(Date.now() + deadlineMs) },
        (error: ServiceError | null, response?: Res) => {
          if (error) reject(fromServiceError(error));
          else if (response === undefined) reject(new TurnoutError(status.INTERNAL, "", "no answer and no error"));
          else resolve(response);
        },
      );
      call.on("error", () => undefined); // the callback has it
      void (async () => {
        for (const frame of frames) {
          if (!call.write(frame)) await Promise.race([once(call, "drain"), once(call, "close")]);
        }
        call.end();
      })();
    });
  }
}

function once(emitter: NodeJS.EventEmitter, event: string): Promise<void> {
  return new Promise((resolve) => emitter.once(event, () => resolve()));
}
