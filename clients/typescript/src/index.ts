/** What a caller of the services needs beside the generated code in gen/. */
export { crc32c } from "./crc32c.js";
export { fromServiceError, itemError, TurnoutError } from "./errors.js";
export { type CallOptions, Link, type Method } from "./link.js";
export { getPayloads, INLINE_BYTES, putPayload, type Right } from "./payloads.js";
export { type Security, securityFromEnvironment } from "./security.js";
export { type Batch, TrainerHooks, type TrainerSetup } from "./trainer.js";
export { duration, milliseconds, packTokens, TOKENS, unpackTokens } from "./values.js";
export { type Done, type WaitEvent, waitFor, type WaitHandlers } from "./waits.js";
export { install, type Target, type WeightsOf } from "./weights.js";
