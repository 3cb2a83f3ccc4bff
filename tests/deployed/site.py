"""The deployed form on this machine: each service a process of its own, as the manifests start it.

An authority of its own, mutual TLS, a token for each role, journals on disk, an address that is not loopback where the
machine has one. Clients are in the test's process, or in further ones: nothing of a service runs where they do.

Invariants: leaving a site ends every process of it; a member keeps its address, its data directory and its arguments
over all its lives, as under systemd or Kubernetes; what it writes to stderr is kept, so that a test can say that there
was nothing it should not have written.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc
import grpc.aio

from services.runtime.permissions import Role
from tests.deployed.manifests import ROOT, arguments
from tests.runtime.certificates import Authority
from tests.security.houses import Tokens
from turnout.channels import Security, bind, channel_options, connect
from turnout.client import ClientOptions
from turnout.scheduler.v1 import scheduler_pb2

RUN: Final = "my-run"
SERVICES: Final = ("buffer", "engine", "scheduler")
TURNOUT: Final = (sys.executable, "-P", "-m", "services.cli.main")
START_S: Final = 60.0
"""Seconds for a start on a machine with other things to do."""

STOP_S: Final = 30.0
"""terminationGracePeriodSeconds of the manifests."""

REPLICAS: Final = {"agent-standalone": ("s0:standalone", "s1:standalone"), "agent-hybrid": ("h0:hybrid", "h1:hybrid")}
AGENTS: Final = tuple(REPLICAS)


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback; 127.0.0.1 where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            # Of a datagram socket this sends nothing.
            asked.connect(("192.0.2.1", 9))
            return str(asked.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def free_port(host: str) -> int:
    """A port that nobody has now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


class NotStarted(Exception):
    """A process ended, or stayed silent, in place of saying where it listens; the message is what it wrote."""

    def __init__(self, code: int | None, errors: str) -> None:
        super().__init__(f"exit code {code}: {errors}")
        self.code = code
        self.errors = errors


@dataclass
class Member:
    """One process of the site over all its lives."""

    name: str
    arguments: list[str]
    target: str
    log: Path
    data_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    """What starts the command, such as `unshare --pid --fork`."""
    program: Sequence[str] = TURNOUT
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    _began: int = 0

    def start(self) -> Self:
        """Begin a life and wait until it serves. Raises NotStarted."""
        return self.launch().ready()

    def launch(self) -> Self:
        """Begin a life."""
        self._began = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*self.before, *self.program, *self.arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.lives += 1
        return self

    def ready(self) -> Self:
        """Wait until it serves. Raises NotStarted."""
        assert self.process is not None
        found = re.search(r"listening on (\S+)", self._first_line())
        if not found:
            self.kill()
            raise NotStarted(self.process.returncode, self.said_now())
        self.target = found[1]
        return self

    def _first_line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(START_S):
                return ""
        return self.process.stdout.readline().decode()

    @property
    def pid(self) -> int:
        """Of the present life."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = STOP_S) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        assert self.process is not None
        code = self.process.wait(within_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """kill -9, unless it has ended."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it in order; the exit code."""
        self.send(number)
        return self.wait()

    def restart(self) -> None:
        """As an operator does it: SIGTERM, and a start with the same arguments."""
        assert self.stop() == 0
        self.start()

    def said(self) -> str:
        """All that it wrote to stderr, in all lives."""
        return self.log.read_text() if self.log.exists() else ""

    def said_now(self) -> str:
        """What it wrote to stderr in its present life."""
        return self.log.read_bytes()[self._began :].decode()

    @property
    def resident_bytes(self) -> int:
        """Memory of the present life."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Site:
    """The members and what lets a client in; start what a test needs with `start`."""

    def __init__(
        self, root: Path, *, host: str | None = None, run_id: str = RUN, identities: Sequence[str] = ()
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.run_id = run_id
        self.host = host or own_address()
        self.authority = Authority(root / "tls")
        names = dict.fromkeys((self.host, "127.0.0.1", "::1", "localhost", *SERVICES, *identities))
        self.cert, self.key = self.authority.issue("tls", *names)
        self.tokens = Tokens(root / "tokens.yaml", run=run_id)
        self.tokens.write()
        self._token_files: dict[str, Path] = {}
        self.members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in reversed(self.members.values()):
            member.kill()

    def member(
        self, workload: str, *more: str, listen: str = "", name: str = "", replicas: Sequence[str] = ()
    ) -> Member:
        """Describe a member: a service, or an agent of the manifests; `more` are further flags."""
        name = name or workload
        listen = listen or f"{self.host}:{free_port(self.host)}"
        data_dir = None if workload in AGENTS else self.root / "data" / name
        flags = self.arguments(workload, listen, data_dir, replicas or REPLICAS.get(workload, ()))
        made = Member(name, [*flags, *more], listen, self.root / f"{name}.log", data_dir)
        self.members[name] = made
        return made

    def arguments(self, workload: str, listen: str, data_dir: Path | None, replicas: Sequence[str] = ()) -> list[str]:
        """Those of the manifest, with the places of this site."""
        found = []
        for text in arguments(workload):
            flag, _, value = text.partition("=")
            match flag:
                case "--listen":
                    value = listen
                case "--metrics-listen":
                    value = f"{self.host}:{free_port(self.host)}"
                case "--data-dir":
                    value = str(data_dir)
                case "--tls-cert" | "--peer-cert":
                    value = str(self.cert)
                case "--tls-key" | "--peer-key":
                    value = str(self.key)
                case "--tls-client-ca" | "--peer-ca":
                    value = str(self.authority.ca)
                case "--tokens-file":
                    value = str(self.tokens.path)
                case "--peer-token-file":
                    value = str(self.token_file(Role.SERVICE))
                case "--run":
                    value = self.run_id
                case "--vllm-config":
                    continue  # the reference engine in its place: there is no GPU
                case "--replica":
                    found += [f"--replica={replica}" for replica in replicas]
                    continue
                case "--insecure":
                    raise AssertionError("the component tls takes --insecure away")
            found.append(f"{flag}={value}" if "=" in text else flag)
        return found

    def start(self, *workloads: str, **flags: Sequence[str]) -> Self:
        """Describe and start these members, all at once; `flags` are further ones, by workload (`_` for `-`)."""
        made = [self.member(one, *flags.get(one.replace("-", "_"), ())) for one in workloads]
        for member in made:
            member.launch()
        for member in made:
            member.ready()
        return self

    def token_file(self, role: Role) -> Path:
        """The file with a role's token: the operator's and the services' are for all runs."""
        if role not in self._token_files:
            path = self.root / f"{role}.token"
            path.touch(0o600)
            path.write_text(self.tokens.all(role) if role in (Role.OPERATOR, Role.SERVICE) else self.tokens.of(role))
            self._token_files[role] = path
        return self._token_files[role]

    def security(self, role: Role = Role.OPERATOR) -> Security:
        """How a client of this role shows who it is."""
        return Security(ca=self.authority.ca, cert=self.cert, key=self.key, token_file=self.token_file(role))

    def opening(self) -> scheduler_pb2.OpenRunRequest:
        """What opens the run at the scheduler, between the buffer and the controller of this site."""
        return scheduler_pb2.OpenRunRequest(
            run_id=RUN,
            config=scheduler_pb2.RunConfig(
                train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=9, group_size=1
            ),
            buffer_target=self.members["buffer"].target,
            engine_target=self.members["engine"].target,
        )

    def options(self, role: Role = Role.OPERATOR, **more: Any) -> ClientOptions:
        """The same for the shipped client."""
        return ClientOptions(security=self.security(role), **more)

    def environment(self, role: Role = Role.OPERATOR) -> dict[str, str]:
        """The same for processes: commands, trainers, workers."""
        return {
            "TURNOUT_CA": str(self.authority.ca),
            "TURNOUT_CERT": str(self.cert),
            "TURNOUT_KEY": str(self.key),
            "TURNOUT_TOKEN_FILE": str(self.token_file(role)),
        }

    def turnout(
        self, *words: str, role: Role = Role.OPERATOR, timeout: float = 50.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, with the services' targets in its environment."""
        targets = {
            f"TURNOUT_TARGET_{name.upper()}": self.members[name].target for name in SERVICES if name in self.members
        }
        return subprocess.run(
            [*TURNOUT, *words],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment(role), **targets, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def register(self) -> None:
        """Make the agents' replicas known to the controller, as the pods' postStart does it."""
        agents = [member.target for member in self.members.values() if member.data_dir is None]
        words = [word for target in agents for word in ("--agent", target)]
        done = self.turnout("engine", "register", self.run_id, *words, role=Role.TRAINER)
        assert done.returncode == 0, done.stderr

    def channel(self, target: str, role: Role = Role.OPERATOR) -> Channel:
        """A channel for plain generated stubs; see `Channel`."""
        return Channel(target, self.security(role))


class Channel:
    """An asyncio channel with TLS and token; as a context manager it gives what stubs are made of."""

    def __init__(self, target: str, security: Security) -> None:
        options = channel_options(
            target, max_message_bytes=64 << 20, keepalive_s=4.0, keepalive_timeout_s=5.0, reconnect_s=1.0
        )
        self._channel = connect(target, options, security)
        self._security = security

    async def __aenter__(self) -> grpc.aio.Channel:
        return bind(self._channel, self._security)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


@contextmanager
def site(root: Path, *workloads: str, **how: Any) -> Iterator[Site]:
    """A site with these members running, for the length of a block."""
    with Site(root, **how) as made:
        yield made.start(*workloads)


def until(deadline_s: float) -> Iterator[float]:
    """Yield until the time is over, with short pauses: for what happens in other processes and tells nobody."""
    ends = time.monotonic() + deadline_s
    while (left := ends - time.monotonic()) > 0:
        yield left
        time.sleep(0.05)
    raise TimeoutError(f"it did not come about within {deadline_s:g} s")
