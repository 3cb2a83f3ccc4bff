/**
 * A trainer and a rollout worker against live services.
 *
 *     node dist/example/main.js --run my-run --steps 4 --buffer HOST:PORT --engine HOST:PORT --scheduler HOST:PORT
 *
 * Prints one JSON line per stage, and at the end the ledger: what was trained on, and how the buffer accounts for it.
 */
import { Link } from "../src/index.js";
import { jobOf, tell } from "./job.js";
import { train } from "./trainer.js";
import { Worker } from "./worker.js";

const job = jobOf(process.argv.slice(2));
// A worker's waits and a trainer's calls do not share a connection: neither can hold up the other.
const own = { buffer: new Link(job.buffer), engine: new Link(job.engine) };
const worker = new Worker(job, own.buffer, own.engine);

try {
  const training = train(job).finally(() => worker.stop());
  const [ledger] = await Promise.all([training, worker.run()]);
  tell({ ledger, outages: worker.outages.count });
} finally {
  for (const link of Object.values(own)) link.close();
}
