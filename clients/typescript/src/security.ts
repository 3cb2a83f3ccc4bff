/**
 * How a client shows who it is, and knows whom it talks to.
 *
 * Invariants: a token is never sent to another machine without TLS unless `insecure` says so; Unix sockets are plain,
 * everything else is TLS as soon as anything of TLS is given.
 */
import { readFileSync } from "node:fs";
import { isIP } from "node:net";
import { rootCertificates } from "node:tls";
import {
  type ChannelCredentials,
  type ChannelOptions,
  credentials,
  InterceptingCall,
  type Interceptor,
} from "@grpc/grpc-js";

/** Files are PEM. */
export interface Security {
  /** Authorities that vouch for the servers; "system": those that Node.js brings along. */
  ca?: string;
  /** The client's own certificate, for mutual TLS, with `key`. */
  cert?: string;
  key?: string;
  /** Name that the server's certificate must bear, if it is not the host of the target. */
  serverName?: string;
  /** What the client may do, as `turnout token new` printed it. */
  token?: string;
  /** File that holds the token; read at every call. */
  tokenFile?: string;
  /** Send the token also without TLS to other machines. */
  insecure?: boolean;
}

/** Reads TURNOUT_CA, _CERT, _KEY, _SERVER_NAME, _TOKEN, _TOKEN_FILE and _INSECURE; an empty one is unset. */
export function securityFromEnvironment(environment: NodeJS.ProcessEnv = process.env): Security {
  const names = { ca: "CA", cert: "CERT", key: "KEY", serverName: "SERVER_NAME", token: "TOKEN", tokenFile: "TOKEN_FILE" };
  const given = Object.entries(names).map(([field, name]) => [field, environment[`TURNOUT_${name}`]] as const);
  const insecure = ["1", "true", "yes", "on"].includes((environment["TURNOUT_INSECURE"] ?? "").toLowerCase());
  return { ...Object.fromEntries(given.filter(([, value]) => value)), insecure };
}

/** Whether a target is on this machine. */
export function isLocal(target: string): boolean {
  if (isUnix(target)) return true;
  const place = target.slice(target.lastIndexOf("/") + 1);
  const host = place.startsWith("[") ? place.slice(1, place.indexOf("]")) : place.slice(0, place.lastIndexOf(":"));
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

/** What a client of a target is made with. Throws if a token would travel in the open, or a file cannot be read. */
export function secured(target: string, security: Security): [ChannelCredentials, ChannelOptions, Interceptor[]] {
  const { ca, cert, key, serverName, token, tokenFile } = security;
  if ((cert === undefined) !== (key === undefined)) throw new Error("a client certificate needs both cert and key");
  if (token !== undefined && tokenFile !== undefined) throw new Error("give token or tokenFile, not both");
  const tls = (ca ?? cert ?? serverName) !== undefined && !isUnix(target);
  const tokened = token !== undefined || tokenFile !== undefined;
  if (tokened && !tls && !security.insecure && !isLocal(target)) {
    throw new Error(`a token is not sent to ${target} without TLS: give the authority of its certificate (TURNOUT_CA)`);
  }
  const read = (path: string | undefined) => (path === undefined ? null : readFileSync(path));
  const roots = ca === undefined || ca === "system" ? Buffer.from(rootCertificates.join("\n")) : readFileSync(ca);
  const channel = tls ? credentials.createSsl(roots, read(key), read(cert)) : credentials.createInsecure();
  const options: ChannelOptions =
    tls && serverName !== undefined
      ? { "grpc.ssl_target_name_override": serverName, "grpc.default_authority": serverName }
      : {};
  const bearer: Interceptor = (how, next) =>
    new InterceptingCall(next(how), {
      start(metadata, listener, begin) {
        metadata.set("authorization", `Bearer ${token ?? readFileSync(tokenFile as string, "ascii").trim()}`);
        begin(metadata, listener);
      },
    });
  return [channel, options, tokened ? [bearer] : []];
}

function isUnix(target: string): boolean {
  return target.startsWith("unix:") || target.startsWith("unix-abstract:");
}
