"""Who may call: the check that every call passes before a servicer hears of it.

Invariants: a call without a token in force is UNAUTHENTICATED; one that its role may not make, or that names a run
which is not its token's, is PERMISSION_DENIED, whether the run exists or not; no answer says more to a stranger than
that. Every message that names a run is checked, in streams too. A token that leaves the file ends the calls at work
with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message

from services.runtime.errors import Code, TurnoutError, resource_exhausted
from services.runtime.permissions import PERMISSIONS, Roles
from services.runtime.tasks import Tick
from services.runtime.tokens import Token, TokenFile

_OPEN: Final = "/grpc.health."
"""Probes of an orchestrator have no token, and learn nothing but whether the service serves."""

_SCHEME: Final = "bearer "
_LOOK_S: Final = 1.0
"""A change of the tokens file counts after about this long."""

End = Callable[["asyncio.Task[Any]", TurnoutError], None]
"""Ends a call at work with an error."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What one token may use at a time."""

    calls_per_s: float
    """Calls begun per wall second, and as many at once after a pause."""
    calls_at_work: int
    """Calls open at once, parked ones too."""


class Caller:
    """One token in use."""

    __slots__ = ("_allowance", "_at", "_limits", "calls", "token")

    def __init__(self, token: Token, limits: TokenLimits, now: float) -> None:
        self.token = token
        self.calls: set[asyncio.Task[Any]] = set()
        self._limits = limits
        self._allowance = limits.calls_per_s
        self._at = now

    def enter(self, task: asyncio.Task[Any], now: float) -> None:
        """Begin a call; raises RESOURCE_EXHAUSTED / RATE_LIMITED or TOO_MANY_CALLS."""
        limits = self._limits
        self._allowance = min(limits.calls_per_s, self._allowance + (now - self._at) * limits.calls_per_s)
        self._at = now
        if self._allowance < 1:
            message = f"the token {self.token.id} makes more than {limits.calls_per_s:g} calls a second"
            error = resource_exhausted(
                "RATE_LIMITED", message, cap="token_calls_per_s", limit=limits.calls_per_s, token=self.token.id
            )
            error.retry_after = (1 - self._allowance) / limits.calls_per_s
            raise error
        if len(self.calls) >= limits.calls_at_work:
            message = f"the token {self.token.id} has {len(self.calls)} calls at work"
            raise resource_exhausted(
                "TOO_MANY_CALLS",
                message,
                cap="token_calls_at_work",
                limit=limits.calls_at_work,
                present=len(self.calls),
                token=self.token.id,
            )
        self._allowance -= 1
        self.calls.add(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """The call has ended."""
        self.calls.discard(task)


class Guard:
    """The callers of one server."""

    def __init__(
        self,
        tokens: TokenFile,
        limits: TokenLimits,
        now: Callable[[], float],
        permissions: Mapping[str, Roles] = PERMISSIONS,
    ) -> None:
        """`now` gives monotonic wall seconds."""
        self._tokens = tokens
        self._limits = limits
        self._now = now
        self._permissions = permissions
        self._callers: dict[str, Caller] = {}

    def gate(self, method: str, request: Message) -> Gate | None:
        """Return what guards one call, which takes messages as `request` is; None if the call is open to all."""
        if method.startswith(_OPEN):
            return None
        return Gate(self, method, self._permissions.get(method, frozenset()), _place_of_run(request))

    def admit(self, task: asyncio.Task[Any], context: grpc.aio.ServicerContext[Any, Any], gate: Gate) -> Caller:
        """Return who makes a call, which `task` serves; the caller leaves when it has ended. Raises."""
        token = self._tokens.find(_bearer(context))
        if token is None:
            raise TurnoutError(Code.UNAUTHENTICATED, "TOKEN_UNKNOWN", "the token is not one of this service")
        gate.check_role(token)
        now = self._now()
        caller = self._callers.get(token.id)
        if caller is None or caller.token != token:
            caller = self._callers[token.id] = Caller(token, self._limits, now)
        caller.enter(task, now)
        return caller

    def refresh(self, end: End) -> None:
        """Read the tokens again if they changed, and end the calls of those that are gone."""
        if not self._tokens.refresh():
            return
        for caller in list(self._callers.values()):
            if self._tokens.holds(caller.token):
                continue
            del self._callers[caller.token.id]
            for task in list(caller.calls):
                end(task, TurnoutError(Code.UNAUTHENTICATED, "TOKEN_REVOKED", "the token is no longer in force"))

    def watching(self, end: End) -> Callable[[Tick], Any]:
        """Return a background task that refreshes."""

        async def watch(tick: Tick) -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                self.refresh(end)
                tick()

        return watch


class Gate:
    """What guards one call."""

    def __init__(self, guard: Guard, method: str, roles: Roles, place: tuple[str, ...] | None) -> None:
        self._guard = guard
        self._call = method.rpartition("/")[2]
        self._roles = roles
        self._place = place

    def admit(self, task: asyncio.Task[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Return who makes the call. Raises UNAUTHENTICATED, PERMISSION_DENIED or RESOURCE_EXHAUSTED."""
        return self._guard.admit(task, context, self)

    def check_role(self, token: Token) -> None:
        """Raise PERMISSION_DENIED if the token may never make this call."""
        if token.role not in self._roles:
            allowed = ", ".join(sorted(self._roles)) or "nobody"
            message = f"{self._call} is for {allowed}; the token {token.id} is that of a {token.role}"
            raise _denied("ROLE_NOT_ALLOWED", message, token, call=self._call, allowed=allowed)
        if token.run is not None and self._place is None:
            message = f"{self._call} answers for all runs; the token {token.id} is for one"
            raise _denied("RUN_NOT_ALLOWED", message, token, call=self._call)

    def check_run(self, token: Token, message: Any) -> None:
        """Raise PERMISSION_DENIED if `message` names a run that is not the token's."""
        if token.run is None or self._place is None:
            return
        for name in self._place:
            if not message.HasField(name):
                return
            message = getattr(message, name)
        if message.run_id != token.run:
            text = f"the token {token.id} is for the run {token.run!r} alone"
            raise _denied("RUN_NOT_ALLOWED", text, token, call=self._call, run_id=message.run_id)


def _denied(reason: str, message: str, token: Token, **metadata: object) -> TurnoutError:
    return TurnoutError(
        Code.PERMISSION_DENIED, reason, message, {**metadata, "token": token.id, "role": str(token.role)}
    )


def _bearer(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    raise TurnoutError(
        Code.UNAUTHENTICATED, "TOKEN_MISSING", "the call needs a token: metadata authorization, 'Bearer' and the token"
    )


def _place_of_run(request: Message) -> tuple[str, ...] | None:
    """Return the fields that lead to the message with the field `run_id`; None if there is none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        return ()
    header = fields.get("header")
    if header is not None and header.message_type is not None and "run_id" in header.message_type.fields_by_name:
        return ("header",)
    return None
