"""The services themselves, at their gRPC targets: whether a port is free or who answers, and from where.

Invariants: every target is given the same few seconds, however it fails; what stands in the way is named: a proxy
variable, a name that does not resolve, a port that refuses, one that speaks something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.doctor.finding import Finding, ok, problem, warning
from services.doctor.handshake import tls_trouble
from services.runtime.addresses import Address, AddressError, parse_address
from services.runtime.health import CLOCK, VERSION
from turnout.channels import Security, SecurityError, channel_options, connect, proxy_variable

ASK_S: Final = 4.0
"""For one step: a local answer takes milliseconds, a lost packet a second or three."""

_GRPC_KINDS: Final = ("dns:", "ipv4:", "ipv6:", "unix-abstract:", "vsock:", "xds:")
"""Targets that name a resolver of gRPC's."""

_MESSAGE_BYTES: Final = 1 << 16

SKEW_S: Final = 1.0
"""Above it events of two services cannot be put in order, and logs mislead."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something of ours should be. `service`: buffer, engine, scheduler, or empty for anything of ours.

    `expected`: it was named by the user, so it has to answer; the others may as well be free.
    """

    service: str
    target: str
    expected: bool

    @property
    def subject(self) -> str:
        """How findings name it."""
        return f"{self.service} {self.target}".strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service told. `skew_s`: its clock less ours, None if it did not tell."""

    serving: bool
    version: str | None
    skew_s: float | None
    names: frozenset[str]
    """Full names that it offers."""


FULL_NAMES: Final = {
    "buffer": "turnout.buffer.v1.ReplayBuffer",
    "engine": "turnout.engine.v1.EngineController",
    "scheduler": "turnout.scheduler.v1.SwitchScheduler",
}


class NoAnswerError(Exception):
    """No service of ours answered; `advice` says what to do."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.advice = advice


async def check_place(place: Place, environ: Mapping[str, str], own_version: str) -> list[Finding]:
    """Everything about one target."""
    found = list(_proxy(place, environ))
    try:
        if not await _listens(place):
            if place.expected:
                advice = f"start it there ({_serve(place)}), or name another target"
                return [*found, problem("port", place.subject, "nobody listens", advice)]
            return [*found, ok("port", place.subject, "free")]
        answer = await ask(place.target)
    except NoAnswerError as error:
        return [*found, problem("port", place.subject, str(error), error.advice)]
    return [*found, *judge(place, answer, own_version)]


def _serve(place: Place) -> str:
    return f"turnout {place.service or 'SERVICE'} serve --listen {place.target}"


def _proxy(place: Place, environ: Mapping[str, str]) -> Iterator[Finding]:
    variable = proxy_variable(place.target, environ)
    if variable is not None:
        host = place.target.rpartition(":")[0]
        text = f"{variable}={_without_password(environ[variable])} sends gRPC to a proxy"
        advice = f"add the host to no_proxy: no_proxy=...,{host}; a proxy cuts long waits"
        yield problem("proxy", place.subject, text, advice)


def _without_password(url: str) -> str:
    scheme, slashes, rest = url.rpartition("://")
    return scheme + slashes + rest.rpartition("@")[2]


async def _listens(place: Place) -> bool:
    """Whether a port takes connections. Raises NoAnswerError if that cannot be known."""
    try:
        address = parse_address(place.target)
    except AddressError as error:
        if not place.target.startswith(_GRPC_KINDS):
            raise NoAnswerError(f"is no target: {error}", "write HOST:PORT or unix:PATH") from None
        # gRPC's own attempt tells.
        return True
    try:
        async with asyncio.timeout(ASK_S):
            writer = (await _connect(address))[1]
    except ConnectionRefusedError:
        return False
    except TimeoutError:
        raise NoAnswerError("packets are lost on the way", "look for a firewall, or a host that is down") from None
    except (OSError, UnicodeError) as error:
        # A name that no resolver takes, such as a..b, is a UnicodeError.
        if address.path and isinstance(error, FileNotFoundError):
            return False
        text = f"cannot be reached: {getattr(error, 'strerror', None) or error}"
        raise NoAnswerError(text, "mend the name or the route: getent hosts, ip route get") from None
    writer.close()
    return True


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.path:
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port)


async def ask(target: str) -> Answer:
    """What the service at `target` tells of itself. Raises NoAnswerError."""
    security = Security.from_environment()
    options = channel_options(
        target, max_message_bytes=_MESSAGE_BYTES, keepalive_s=10.0, keepalive_timeout_s=ASK_S, reconnect_s=ASK_S
    )
    try:
        # Health needs no token, so none is sent.
        channel = connect(target, options, replace(security, token=None, token_file=None))
    except SecurityError as error:
        raise NoAnswerError(str(error), "give files that can be read: --ca, --cert, --key") from None
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        begun, began_at = time.perf_counter(), time.time()
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_S)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise await _no_answer(target, security, error) from error
        half_s = (time.perf_counter() - begun) / 2
        told = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        names = [name for name in FULL_NAMES.values() if await _offers(stub, name)]
    # Its clock was read somewhere between question and answer: by half of that time it may be off.
    skew_s = None if CLOCK not in told else _beyond(float(told[CLOCK]) - (began_at + half_s), half_s)
    serving = response.status == health_pb2.HealthCheckResponse.SERVING
    return Answer(serving, told.get(VERSION), skew_s, frozenset(names))


def _beyond(difference: float, uncertainty: float) -> float:
    size = max(0.0, abs(difference) - uncertainty)
    return size if difference > 0 else -size


async def _offers(stub: Any, name: str) -> bool:
    try:
        await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=ASK_S)
    except grpc.aio.AioRpcError:
        return False
    return True


async def _no_answer(target: str, security: Security, error: grpc.aio.AioRpcError) -> NoAnswerError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NoAnswerError("a gRPC server of another kind listens there", "stop it, or use another port: --listen")
    with contextlib.suppress(AddressError):
        if (trouble := await tls_trouble(parse_address(target), target, security, ASK_S)) is not None:
            return NoAnswerError(*trouble)
    text = f"something listens there that is none of ours ({error.code().name}: {error.details()})"
    port = target.rpartition(":")[2]
    return NoAnswerError(text, f"see who: ss -ltnp 'sport = :{port}'; stop it, or use another port: --listen")


def judge(place: Place, answer: Answer, own_version: str) -> Iterator[Finding]:
    """What an answer means."""
    wanted = FULL_NAMES.get(place.service)
    if not answer.names:
        advice = "stop it, or use another port: --listen"
        yield problem("port", place.subject, "a gRPC server of another kind answers", advice)
        return
    if wanted is not None and wanted not in answer.names:
        offered = ", ".join(service for service, name in FULL_NAMES.items() if name in answer.names)
        yield problem("port", place.subject, f"the {offered} answers there", f"name the target of the {place.service}")
        return
    if not answer.serving:
        advice = "read its log: it is loading, or its journal or all of its engines are away"
        yield problem("health", place.subject, "answers, and is NOT_SERVING", advice)
    else:
        yield ok("health", place.subject, "serves")
    if answer.version is not None and answer.version != own_version:
        text = f"is version {answer.version}, this command {own_version}"
        yield warning("versions", place.subject, text, "upgrade the older one: all services, then clients")
    if answer.skew_s is not None:
        yield judge_skew(place.subject, answer.skew_s)


def judge_skew(subject: str, skew_s: float) -> Finding:
    """What a difference between its clock and ours means."""
    if abs(skew_s) <= SKEW_S:
        return ok("clock", subject, "agrees with ours within a second")
    side = "ahead of" if skew_s > 0 else "behind"
    advice = "synchronise both machines: chronyc tracking, timedatectl"
    return problem("clock", subject, f"is {abs(skew_s):.1f} s {side} ours", advice)
