/** A token that travels in the open is everybody's. */
import assert from "node:assert/strict";
import test from "node:test";
import { Link, securityFromEnvironment } from "../src/index.js";

const token = "turnout.w.s3cret";

test("a token is not sent to another machine in the open", () => {
  for (const target of ["node-7:50051", "10.0.0.1:50051", "dns:///node-7:50051", "[fd00::1]:50051"]) {
    assert.throws(
      () => new Link(target, { token }),
      (error: Error) => error.message.includes("without TLS") && !error.message.includes("s3cret"),
    );
    new Link(target, { token, insecure: true }).close();
    new Link(target, { token, ca: "system" }).close();
  }
  for (const target of ["127.0.0.1:50051", "localhost:50051", "[::1]:50051", "unix:/run/turnout.sock"]) {
    new Link(target, { token }).close();
  }
});

test("half a certificate and a missing file are errors", () => {
  assert.throws(() => new Link("node-7:50051", { cert: "/c.pem" }), /both cert and key/);
  assert.throws(() => new Link("node-7:50051", { ca: "/none.pem" }), /ENOENT/);
});

test("the environment says it for programs that do not", () => {
  const given = { TURNOUT_CA: "/ca.pem", TURNOUT_TOKEN: token, TURNOUT_KEY: "", TURNOUT_INSECURE: "1" };
  assert.deepEqual(securityFromEnvironment(given), { ca: "/ca.pem", token, insecure: true });
});
