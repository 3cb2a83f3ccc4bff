/**
 * Waits that outlive a restart of the service.
 *
 * Invariants: a wait ends with its final event, with its time, or with an error of the service; being cut off is none of
 * these. Each arming carries the time that is left and whatever else the caller's `arm` puts in: the same cursor, the
 * same request_id, so that nothing is lost or counted twice.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import type { RefillDue, WaitProgress } from "../gen/turnout/buffer/v1/buffer.js";
import { TurnoutError } from "./errors.js";
import type { Link, Method } from "./link.js";

/** One event of a wait, as in the `event` of its messages. */
export interface WaitEvent {
  $case: string;
  value: unknown;
}

/** The final event among the events of a wait. */
export type Done<Event> = Extract<Event, { $case: "done" }> extends { value: infer Value } ? Value : never;

export interface WaitHandlers<Event> {
  /** How it stands, for a log. */
  progress?: (progress: WaitProgress) => void;
  /** Prompts are needed: answer with AddGroups or DeclineRefill, from here, or supply stands still. */
  refill: (due: RefillDue) => Promise<void>;
  /** Parts of a batch. */
  other?: (event: Exclude<Event, { $case: "progress" | "refillDue" | "done" }>) => void;
  /** The stream begins anew: forget the parts of a batch that came so far. */
  rearmed?: () => void;
}

/** How long a service may be away before a wait gives up. */
const OUTAGE_MS = 60_000;
const GRACE_MS = 5_000;

/**
 * Waits for the final event. `arm` makes the request of an arming, given the milliseconds left.
 */
export async function waitFor<Req, Event extends WaitEvent>(
  link: Link,
  method: Method<Req, { event?: Event | undefined }>,
  arm: (leftMs: number) => Req,
  maxWaitMs: number,
  handlers: WaitHandlers<Event>,
): Promise<Done<Event>> {
  const end = performance.now() + maxWaitMs;
  let heard = performance.now();
  for (let pause = 50; ; pause = Math.min(2 * pause, 2_000)) {
    const left = Math.max(0, end - performance.now());
    try {
      for await (const { event } of link.stream(method, arm(left), left + GRACE_MS)) {
        heard = performance.now();
        pause = 50;
        // An event that is not set comes from a newer service.
        if (event === undefined) continue;
        if (event.$case === "done") return event.value as Done<Event>;
        if (event.$case === "progress") handlers.progress?.(event.value as WaitProgress);
        else if (event.$case === "refillDue") await handlers.refill(event.value as RefillDue);
        else handlers.other?.(event as Parameters<NonNullable<typeof handlers.other>>[0]);
      }
      throw new TurnoutError(status.UNAVAILABLE, "", "the stream ended without its final event");
    } catch (error) {
      const again = error instanceof TurnoutError && error.retryable && performance.now() - heard < OUTAGE_MS;
      if (!again || performance.now() + pause >= end) throw error;
      handlers.rearmed?.();
      await sleep(pause);
    }
  }
}
