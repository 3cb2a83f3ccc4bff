"""verl's own server actor (`vLLMHttpServer` of verl 0.9.1, rank 0 of its node) as a `Surface`.

verl's calls skip in silence what does not apply, tell neither what is asleep nor whether the gate is closed, and put
errors into replies. So the actor is looked at from inside: `__ray_call__` runs a function on its object, which also
keeps a note there of what was done to its memory, for a controller that comes later.

Invariants: what verl would skip is not offered; a reply that carries an error is a failure; the gate stays closed from
the pause to the resume, and late requests are rejected there, which verl's client answers by going elsewhere; an actor
whose state nobody knows is refused, since resuming freed memory kills the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from services.engine.backends.base import engine_dead
from services.engine.cluster.actors import Actor
from services.engine.cluster.verl_requests import Requests, look_at_requests, read_requests
from services.engine.domain.requests import Finish
from services.engine.domain.spec import KV_CACHE, WEIGHTS
from services.engine.guarded import surface as calls
from services.engine.guarded.residency import TAGS
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.runtime.errors import TurnoutError, aborted, describe, failed_precondition

CHECK_S: Final = 0.5
"""Wall seconds for a sign of life; the actor's loop answers while its engine works."""

METHODS: Final = {
    "abort_all_requests": ("reset_prefix_cache", "reject_request"),
    "abort_request": ("request_id", "reset_prefix_cache"),
    "clear_kv_cache": (),
    "collective_rpc": ("method", "args", "kwargs"),
    "generate": ("prompt_ids", "sampling_params", "request_id"),
    "get_server_address": (),
    "release_kv_cache": (),
    "resume_generation": (),
    "resume_kv_cache": (),
    "set_global_steps": ("global_steps",),
    "sleep": (),
    "wake_up": ("tags",),
}
"""What we call of the actor, and the names that we give."""

ENGINE_CALLS: Final = {
    "pause_generation": ("wait_for_inflight_requests", "clear_cache"),
    "resume_generation": (),
    "sleep": ("level",),
    "wake_up": ("tags",),
    "reset_prefix_cache": ("reset_connector",),
    "reset_mm_cache": (),
    "reset_encoder_cache": (),
}
"""What those methods call of vLLM, and the names that verl gives."""

HYBRID: Final = "hybrid"
STANDALONE: Final = "standalone"
NOT_FOUND: Final = "not found"
"""In the reply of an abort that came too late, which is fine."""


def look() -> Callable[[Any], dict[str, Any]]:
    """A function that tells about a server. It is nested, so that it travels by value."""

    def facts(server: Any) -> dict[str, Any]:
        import inspect

        engine = getattr(server, "engine", None)
        signatures: dict[str, Any] = {}
        for name in dir(type(engine)):
            method = None if name.startswith("_") else getattr(type(engine), name)
            if inspect.isroutine(method):
                try:
                    named = inspect.signature(method).parameters.values()
                except (TypeError, ValueError):
                    continue
                free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named)
                signatures[name] = {"names": [each.name for each in named], "free": free}
        processor = getattr(engine, "output_processor", None)
        config, mode = getattr(server, "config", None), getattr(server, "rollout_mode", None)
        level = getattr(server, "_resolve_sleep_level", None)
        return {
            "launched": engine is not None,
            "engine": signatures,
            "errored": bool(getattr(engine, "errored", False)),
            "requests": list(getattr(processor, "request_states", ())),
            "mode": str(getattr(mode, "value", mode)),
            "node_rank": getattr(server, "node_rank", 0),
            "frees": bool(getattr(config, "free_cache_engine", False)),
            "longest": getattr(config, "max_model_len", None),
            "level": level() if level is not None else None,
            "steps": getattr(server, "global_steps", None),
            "closed": bool(getattr(server, "_submission_paused", False)),
            "note": getattr(server, "_turnout_note", None),
            "incarnation": f"{__import__('os').getpid()}-{id(engine)}",
        }

    return facts


def write(note: dict[str, Any]) -> Callable[[Any], None]:
    """A function that leaves a note in a server."""

    def leave(server: Any) -> None:
        server._turnout_note = note

    return leave


class VerlSurface:
    """One server actor."""

    tags = TAGS
    schedules_when_awake = False
    """vLLM does, but verl's gate stays closed."""
    vocabulary: int | None = None
    """verl's servers have a tokenizer, by which vLLM judges token ids."""
    text_only = False

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.offers: frozenset[str] = frozenset()
        self.longest: int | None = None
        self.incarnation = ""
        self._level = 0
        self._hybrid = False
        self._asleep: frozenset[str] = frozenset()
        self._asleep_at = 0
        self._in_change = False

    async def find_out(self) -> None:
        """Look at the actor. FAILED_PRECONDITION if it is none of verl's, or does not fit its vLLM."""
        missing = sorted(name for name in METHODS if not self.actor.has(name))
        if missing:
            raise failed_precondition("WRONG_ACTOR", f"{self.actor.name} lacks {missing[0]}: no server of verl 0.9.1")
        facts = await self._look()
        if not facts["launched"] or facts["node_rank"]:
            raise failed_precondition("WRONG_ACTOR", f"{self.actor.name} has no engine: name the server of node rank 0")
        self._check_engine(facts["engine"])
        note = facts["note"]
        if (facts["closed"] and note is None) or (note is not None and note["changing"]):
            raise failed_precondition(
                "ENGINE_STATE_UNKNOWN",
                f"nobody knows what memory {self.actor.name} has: register it while it serves, or start it again",
            )
        if note is not None:
            self._asleep, self._asleep_at = frozenset(note["asleep"]), note["level"]
        self.longest, self.incarnation = facts["longest"], facts["incarnation"]
        self._level, self._hybrid = facts["level"] or 2, facts["mode"] == HYBRID
        offers = {
            calls.PAUSE,
            calls.PAUSE_MODE,
            calls.IS_PAUSED,
            calls.RESET_CONNECTORS,
            calls.RESET_MM,
            calls.RESET_ENCODER,
            calls.COLLECTIVE_RPC,
            calls.WEIGHT_VERSION,
        }
        if self._hybrid and facts["frees"]:
            offers |= {calls.SLEEP, calls.WAKE_TAGS}
        if facts["mode"] == STANDALONE and facts["frees"]:
            offers |= {calls.RELEASE_KV}
        self.offers = frozenset(offers)

    def _check_engine(self, signatures: Mapping[str, Any]) -> None:
        for method, names in ENGINE_CALLS.items():
            known = signatures.get(method)
            absent = [name for name in names if known and not known["free"] and name not in known["names"]]
            if known is None or absent:
                call = f"{method}({absent[0]}=)" if absent else method
                raise failed_precondition(
                    "VERL_VLLM_MISMATCH",
                    f"verl's server {self.actor.name} calls {call}, which the vLLM in it lacks: "
                    "every pause, sleep or reset of it would fail",
                    call=call,
                )

    # ---------------------------------------------------------------------------------------------------------- reads

    async def check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                facts = await self._look()
        except TimeoutError:
            return
        if facts["errored"]:
            raise engine_dead(f"the engine core of {self.actor.name} has died")

    async def unfinished(self) -> int:
        return len((await self._look())["requests"])

    async def read(self, memory: bool = True) -> Reading:
        facts = await self._look()
        if facts["incarnation"] != self.incarnation:
            raise engine_dead(f"the actor {self.actor.name} was started again")
        if facts["note"] is not None and facts["note"]["changing"] and not self._in_change:
            raise engine_dead(
                f"nobody knows what memory {self.actor.name} has since a change of it failed: start it again"
            )
        closed = facts["closed"]
        return Reading(
            asleep=closed or bool(self._asleep),
            paused=closed,
            asleep_tags=self._asleep,
            sleep_level=self._asleep_at,
            unfinished=len(facts["requests"]),
            weight_version=None if facts["steps"] is None else str(facts["steps"]),
        )

    async def requests(self, after: int) -> Requests:
        """The requests in the engine, and those that have ended since the note `after`."""
        found = await self._call("__ray_call__", look_at_requests(), after)
        return read_requests(found)

    # -------------------------------------------------------------------------------------------------------- commands

    async def sleep(self, level: int, mode: str) -> None:
        if level != self._level:
            raise failed_precondition(
                "NOT_OFFERED", f"verl puts {self.actor.name} to sleep at level {self._level} and at no other"
            )
        if not (await self._look())["closed"]:
            await self.pause(mode, False)
        async with self._changing():
            await self._ask("sleep")
            self._asleep, self._asleep_at = TAGS, level

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        wanted = self._asleep & (TAGS if tags is None else frozenset(tags))
        if not wanted:
            return
        async with self._changing():
            if self._hybrid:
                await self._ask("wake_up", tags=sorted(wanted))
            else:
                # Only KV memory is ever released there, and verl's wake_up does nothing.
                await self._ask("resume_kv_cache")
            self._asleep -= wanted
            if WEIGHTS not in self._asleep and self._asleep_at == 1:
                self._asleep_at = 0

    async def release_kv_cache(self) -> None:
        if calls.RELEASE_KV not in self.offers:
            raise self._not_offered("the KV memory of a hybrid server is released by a sleep and a wake of the weights")
        async with self._changing():
            await self._ask("release_kv_cache")
            self._asleep = frozenset({KV_CACHE})

    async def pause(self, mode: str, clear_cache: bool) -> None:
        if mode != "abort":
            raise self._not_offered("verl ends requests at a pause and keeps none")
        # Noted first: without a note a closed gate is a state that nobody knows.
        await self._note()
        # A standalone server is soon back, so late requests wait there; a hybrid one goes to the trainer.
        await self._ask("abort_all_requests", reset_prefix_cache=clear_cache, reject_request=self._hybrid)

    async def resume(self) -> None:
        if self._asleep:
            raise failed_precondition("TAG_ASLEEP", f"{self.actor.name}: {', '.join(sorted(self._asleep))} is asleep")
        await self._ask("resume_generation")

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        # verl does not look at vLLM's answer, which is no while a request runs.
        if await self.unfinished():
            return False
        await self._ask("clear_kv_cache")
        return True

    async def reset_mm_cache(self) -> None:
        await self._ask("clear_kv_cache")

    async def reset_encoder_cache(self) -> None:
        await self._ask("clear_kv_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        # verl gives no answers back.
        return [await self._ask("collective_rpc", method=method, args=tuple(args), kwargs=dict(kwargs))]

    async def reload_weights(self, path: str) -> None:
        raise self._not_offered("verl moves weights by its own means")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        raise self._not_offered("verl moves weights by its own means")

    async def start_update(self) -> None:
        raise self._not_offered("verl moves weights by its own means")

    async def update_weights(self, info: Any) -> None:
        raise self._not_offered("verl moves weights by its own means")

    async def finish_update(self) -> None:
        raise self._not_offered("verl moves weights by its own means")

    async def set_version(self, version: str) -> None:
        await self._ask("set_global_steps", global_steps=int(version))
        if WEIGHTS not in self._asleep:
            self._asleep_at = 0
            await self._note()

    # ------------------------------------------------------------------------------------------------------ generation

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        facts = await self._look()
        for request_id in facts["requests"] if request_ids is None else request_ids:
            reply = await self._call("abort_request", request_id=request_id, reset_prefix_cache=False)
            error = str(reply.get("error") or "")
            if error and NOT_FOUND not in error:
                raise aborted("ENGINE_FAILED", f"{self.actor.name} did not end a request: {error[:300]}")

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        if importlib.util.find_spec("verl") is None:
            raise self._not_offered("its outputs can only be read where verl is installed")
        sampling: dict[str, Any] = {
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "stop_token_ids": list(draw.stop_token_ids),
            "logprobs": draw.logprobs,
        }
        if draw.top_k:
            sampling["top_k"] = draw.top_k
        if draw.seed is not None:
            sampling["seed"] = draw.seed
        ended = False
        try:
            output = await self._call(
                "generate", prompt_ids=list(prompt), sampling_params=sampling, request_id=request_id
            )
            ended = True
            yield read_output(output, draw)
        finally:
            if not ended:
                with contextlib.suppress(TurnoutError):
                    await self.abort([request_id])

    async def close(self) -> None:
        """Nothing: the actor is the trainer's."""

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _look(self) -> dict[str, Any]:
        facts: dict[str, Any] = await self._call("__ray_call__", look())
        return facts

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        self._in_change = True
        try:
            await self._note(changing=True)
            yield
            await self._note()
        finally:
            self._in_change = False

    async def _note(self, changing: bool = False) -> None:
        note = {"asleep": sorted(self._asleep), "level": self._asleep_at, "changing": changing}
        await self._call("__ray_call__", write(note))

    async def _ask(self, method: str, /, **named: Any) -> Any:
        reply = await self._call(method, **named)
        if isinstance(reply, dict) and reply.get("error"):
            raise aborted("ENGINE_FAILED", f"{method} of {self.actor.name} failed: {str(reply['error'])[:300]}")
        return reply

    async def _call(self, method: str, /, *args: Any, **named: Any) -> Any:
        try:
            return await self.actor.call(method, *args, **named)
        except TurnoutError:
            raise
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":
                raise engine_dead(f"the engine core of {self.actor.name} has died") from error
            why = f"{method} of {self.actor.name} failed: {describe(error)[:500]}"
            raise aborted("ENGINE_FAILED", why) from error

    def _not_offered(self, why: str) -> TurnoutError:
        return failed_precondition("NOT_OFFERED", f"{self.actor.name}: {why}")


def read_output(output: Any, draw: Draw) -> Tokens:
    """verl's `TokenOutput`, which comes whole. One that its gate rejected is an abort without tokens."""
    ids, values = list(output.token_ids), list(output.log_probs or ()) if draw.logprobs else []
    if output.stop_reason in ("aborted", "abort"):
        finish = Finish.ABORT
    elif output.stop_reason == "completed":
        finish = Finish.LENGTH if len(ids) >= draw.max_tokens else Finish.STOP
    else:
        raise aborted("ENGINE_FAILED", f"verl ended a request with {output.stop_reason!r}")
    if draw.logprobs and len(values) != len(ids):
        raise aborted("ENGINE_FAILED", f"verl gave {len(values)} log-probabilities for {len(ids)} tokens")
    cached = (output.extra_fields or {}).get("num_cached_tokens")
    return Tokens(ids, values, finish, int(cached or 0))
