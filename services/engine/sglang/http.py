"""A running SGLang server, spoken to over HTTP.

Invariants: its scheduler, which dies of a release with requests running, of a second release and of a resume of what is
there, is never asked for any of them; a flush that succeeded while it is paused is the proof that nothing runs; a route
is offered if an OPTIONS of it is refused for its method, since a GET of several carries them out; request ids are sent
so that none is the beginning of another, since SGLang aborts all that begin alike. `/health` generates a token, also
from memory that is released, so it is never asked.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import httpx

from services.engine.backends.base import engine_dead
from services.engine.domain.requests import Finish
from services.engine.domain.spec import KV_CACHE, WEIGHTS
from services.engine.guarded import surface as calls
from services.engine.guarded.http import HttpServer, read_object
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.engine.sglang.note import Note, read_note
from services.runtime.errors import TurnoutError, aborted, failed_precondition, invalid_argument

CUDA_GRAPH: Final = "cuda_graph"
TAGS: Final = frozenset({WEIGHTS, KV_CACHE, CUDA_GRAPH})
"""The memory that SGLang manages; `cuda_graph` frees nothing where the server was not started to."""

FLUSH_S: Final = 5.0
"""Seconds that a paused server has to come to rest: an iteration of the scheduler, and its results."""

ALL_TOP_K: Final = -1
LOSING_LEVEL: Final = 2

ROUTES: Final = {
    calls.SLEEP: "/release_memory_occupation",
    calls.WAKE_TAGS: "/resume_memory_occupation",
    calls.PAUSE: "/pause_generation",
    calls.WEIGHT_TRANSFER: "/update_weights_from_distributed",
    calls.WEIGHT_SESSIONS: "/begin_weight_update",
    calls.WEIGHT_VERSION: "/update_weight_version",
    calls.RELOAD: "/update_weights_from_disk",
}
"""The POST routes behind the calls."""

NEEDED: Final = (
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/update_weight_version",
)

SOURCES: Final = {
    "distributed": "/update_weights_from_distributed",
    "tensor": "/update_weights_from_tensor",
    "ipc": "/update_weights_from_ipc",
}
"""Where the weights of an update come from, named by its field `from`."""

FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


async def connect(
    url: str, transport: httpx.AsyncBaseTransport | None = None, tls: ssl.SSLContext | None = None
) -> SglangSurface:
    """Look at a server; UNAVAILABLE / ENGINE_UNREACHABLE if none answers, FAILED_PRECONDITION if it lacks a call."""
    surface = SglangSurface(url, transport, tls)
    try:
        await surface.find_out()
    except BaseException:
        await surface.close()
        raise
    return surface


class SglangSurface:
    """One server."""

    tags = TAGS
    schedules_when_awake = False
    vocabulary: int | None = None
    """It judges token ids by itself."""

    def __init__(
        self, url: str, transport: httpx.AsyncBaseTransport | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = HttpServer(url, transport, check=self.check, judges="/generate", tls=tls)
        self.url = self._server.url
        self.offers: frozenset[str] = frozenset()
        self.longest: int | None = None
        self.text_only = False
        self.incarnation = ""
        self._keeps_weights = False
        self._first = ""
        self._written = ""
        self._note = Note()
        self._in_change = False
        self._writes = self._writing = 0

    async def find_out(self) -> None:
        """Ask the server what it is and has."""
        model = await self._model_info()
        missing = [route for route in NEEDED if not await self._has(route)]
        if missing:
            raise failed_precondition("ENGINE_TOO_OLD", f"{self.url} lacks {', '.join(missing)}")
        self._first = self._written = str(model.get("weight_version", ""))
        self._note = read_note(self._first)
        if self._note.changing:
            raise failed_precondition(
                "ENGINE_STATE_UNKNOWN",
                f"nobody knows how the last change of {self.url} ended, and SGLang does not tell: start it again",
            )
        self.text_only = not (model.get("has_image_understanding") or model.get("has_audio_understanding"))
        models = (await self._get("/v1/models")).get("data") or [{}]
        self.longest = models[0].get("max_model_len")
        info = await self._get("/server_info")
        self._keeps_weights = bool(info.get("enable_weights_cpu_backup"))
        self.incarnation = f"{info.get('version', '')} {json.dumps(info.get('startup_time'), sort_keys=True)}"
        offers = {call for call, route in ROUTES.items() if await self._has(route)}
        offers |= {calls.PAUSE_MODE, calls.KEEP, calls.SLEEP_MODE, calls.IS_PAUSED, calls.RESET_RUNNING}
        if calls.WAKE_TAGS not in offers or not info.get("enable_memory_saver"):
            # Without the memory saver a release says yes and frees nothing.
            offers -= {calls.SLEEP, calls.SLEEP_MODE, calls.WAKE_TAGS}
        else:
            offers |= {calls.RELEASE_KV}
        if info.get("hicache_storage_backend") and await self._has("/hicache/storage-backend/clear"):
            offers |= {calls.RESET_CONNECTORS}
        self.offers = frozenset(offers)

    # ---------------------------------------------------------------------------------------------------------- reads

    async def check(self) -> None:
        # The front end ends with its scheduler.
        await self._server.sign_of_life("/model_info")

    async def unfinished(self) -> int:
        told = await self._get("/v1/loads", include="core")
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in told.get("loads", ()))

    async def read(self, memory: bool = True) -> Reading:
        # While a note is being written either text may come.
        begun, quiet = self._writes, not self._writing
        text = str((await self._model_info()).get("weight_version", ""))
        if quiet and begun == self._writes:
            await self._compare(text)
        note = self._note
        return Reading(
            asleep=note.paused or bool(note.asleep),
            paused=note.paused,
            asleep_tags=note.asleep,
            sleep_level=note.level,
            unfinished=await self.unfinished(),
            weight_version=note.version,
        )

    async def _compare(self, text: str) -> None:
        """Look at the server's text, whose note should be ours."""
        if text == self._first != self._written:
            raise engine_dead(f"{self.url} was started again")
        if read_note(text).changing and not self._in_change:
            raise engine_dead(f"nobody knows what memory {self.url} has since a change of it failed: start it again")
        if text != self._written and not self._in_change:
            # A trainer gave it weights and their version by itself, which loses the note.
            await self.set_version(read_note(text).version)

    # -------------------------------------------------------------------------------------------------------- commands

    async def sleep(self, level: int, mode: str) -> None:
        if level == 1 and not self._keeps_weights:
            raise failed_precondition(
                "NOT_OFFERED", f"{self.url} keeps no weights over a sleep: start it with --enable-weights-cpu-backup"
            )
        await self._release(TAGS, level, mode)

    async def release_kv_cache(self) -> None:
        await self._release(frozenset({KV_CACHE}), self._note.level, "keep")

    async def _release(self, tags: frozenset[str], level: int, mode: str) -> None:
        if not self._note.paused:
            await self.pause(mode, False)
        wanted = sorted(tags - self._note.asleep)
        if wanted:
            await self._settle()
            async with self._changing():
                await self._post("/release_memory_occupation", {"tags": wanted})
                self._note = replace(self._note, asleep=self._note.asleep | tags, level=max(level, self._note.level))

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        wanted = sorted(self._note.asleep & (TAGS if tags is None else frozenset(tags)))
        if wanted:
            async with self._changing():
                await self._post("/resume_memory_occupation", {"tags": wanted})
                left = self._note.asleep - frozenset(wanted)
                # Weights that a level 2 threw away stay away until others come.
                level = self._note.level if WEIGHTS in left or self._note.level == LOSING_LEVEL else 0
                self._note = replace(self._note, asleep=left, level=level)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        # In place, requests would keep their blocks: memory could not be released, and they would go on over new
        # weights with keys and values of the old ones.
        # Noted first: one that is paused and does not know it would never run again.
        self._note = replace(self._note, paused=True)
        await self._write()
        await self._post("/pause_generation", {"mode": "retract" if mode == "keep" else "abort"})
        if clear_cache and KV_CACHE not in self._note.asleep:
            await self._settle()

    async def resume(self) -> None:
        if self._note.asleep:
            raise failed_precondition("TAG_ASLEEP", f"{self.url}: {', '.join(sorted(self._note.asleep))} is asleep")
        await self._post("/continue_generation", {})
        self._note = replace(self._note, paused=False)
        await self._write()

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        if KV_CACHE not in self._note.asleep and not await self._flush(FLUSH_S if self._note.paused else 0.0):
            return False
        if connectors:
            await self._post("/hicache/storage-backend/clear", None)
        return True

    async def reset_mm_cache(self) -> None:
        raise self._server.not_offered("it cannot reset its multimodal cache")

    async def reset_encoder_cache(self) -> None:
        raise self._server.not_offered("it cannot reset its encoder cache")

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        raise self._server.not_offered("SGLang has no collective RPC")

    async def _settle(self) -> None:
        """Make sure that nothing runs any more."""
        if not await self._flush(FLUSH_S):
            raise failed_precondition("NOT_DRAINED", f"requests of {self.url} have not come to rest")

    async def _flush(self, seconds: float) -> bool:
        answer = await self._server.request("POST", "/flush_cache", params={"timeout": f"{seconds:g}"})
        if answer.status_code == HTTPStatus.BAD_REQUEST:
            return False
        await self._server.accept(answer)
        return True

    # --------------------------------------------------------------------------------------------------------- weights

    async def reload_weights(self, path: str) -> None:
        await self._post("/update_weights_from_disk", {"model_path": path, "flush_cache": False})

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        if info:
            await self._post("/init_weights_update_group", dict(info))

    async def start_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def update_weights(self, info: Any) -> None:
        fields = dict(info)
        source = fields.pop("from", "distributed")
        if source not in SOURCES:
            raise invalid_argument("info_json", f"weights come from {', '.join(SOURCES)}, not {source!r}", value=source)
        try:
            # A flush that fails with requests kept would kill the scheduler; caches are reset at the commit.
            await self._post(SOURCES[source], fields | {"flush_cache": False})
        except TurnoutError:
            with contextlib.suppress(TurnoutError):
                await self.finish_update()
            raise

    async def finish_update(self) -> None:
        if calls.WEIGHT_SESSIONS in self.offers:
            await self._post("/end_weight_update", {})

    async def set_version(self, version: str) -> None:
        lost = WEIGHTS in self._note.asleep
        self._note = replace(self._note, version=version, level=self._note.level if lost else 0)
        await self._write()

    # ------------------------------------------------------------------------------------------------------ generation

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        if request_ids is None:
            await self._post("/abort_request", {"abort_all": True})
            return
        for request_id in request_ids:
            await self._post("/abort_request", {"rid": wire_id(request_id)})

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        sampling: dict[str, Any] = {
            "max_new_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or ALL_TOP_K,
            "stop_token_ids": list(draw.stop_token_ids),
            "skip_special_tokens": False,
        }
        if draw.seed is not None:
            sampling["sampling_seed"] = draw.seed
        body = {
            "rid": wire_id(request_id),
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": draw.logprobs,
            "stream": True,
        }
        seen = 0
        async with aclosing(self._server.stream("/generate", body)) as chunks:
            async for chunk in chunks:
                tokens, seen = self._read_chunk(chunk, seen, draw.logprobs)
                yield tokens
                if tokens.finish is not None:
                    return
        raise self._server.ended_stream("ended a stream without saying why")

    def _read_chunk(self, chunk: Mapping[str, Any], seen: int, logprobs: bool) -> tuple[Tokens, int]:
        """The new tokens of a chunk, which has all so far, or the new ones where the server streams increments."""
        if "error" in chunk:
            code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
            told = f"{self.url} failed in a request: {str(chunk['error'])[:300]}"
            if code == HTTPStatus.BAD_REQUEST:
                raise invalid_argument("request", told, reason="ENGINE_REFUSED")
            raise aborted("ENGINE_FAILED", told)
        meta = chunk["meta_info"]
        total = int(meta["completion_tokens"])
        fresh = max(0, total - seen)
        ids = (chunk.get("output_ids") or [])[-fresh:] if fresh else []
        values: list[float] = []
        if logprobs and fresh:
            values = [entry[0] for entry in (meta.get("output_token_logprobs") or [])[-fresh:]]
        if len(ids) != fresh or (logprobs and len(values) != fresh):
            raise aborted("ENGINE_FAILED", f"{self.url} counts {fresh} new tokens and gives {len(ids)}")
        reason = meta.get("finish_reason")
        finish = None
        if reason is not None:
            finish = FINISHES.get(reason["type"])
            if finish is None:
                raise aborted("ENGINE_FAILED", f"{self.url} ended a request with {reason['type']!r}")
        return Tokens(ids, values, finish, int(meta.get("cached_tokens") or 0)), max(seen, total)

    async def close(self) -> None:
        await self._server.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Note in the server that a change is under way, and then what it came to; unless it fails."""
        self._in_change = True
        try:
            await self._write(changing=True)
            yield
            await self._write()
        finally:
            self._in_change = False

    async def _write(self, changing: bool = False) -> None:
        text = replace(self._note, changing=changing).write()
        # By default this call aborts all requests.
        self._writes += 1
        self._writing += 1
        try:
            await self._post("/update_weight_version", {"new_version": text, "abort_all_requests": False})
            self._written = text
        finally:
            self._writing -= 1

    async def _model_info(self) -> Mapping[str, Any]:
        return await self._get("/model_info")

    async def _has(self, route: str) -> bool:
        return await self._server.has(route, by="OPTIONS")

    async def _get(self, path: str, **query: str) -> Mapping[str, Any]:
        return read_object(await self._server.get(path, query))

    async def _post(self, path: str, body: Any) -> None:
        told = read_object(await self._server.post(path, body=body))
        if told.get("success") is False:
            raise aborted("ENGINE_FAILED", f"{self.url} failed: {str(told.get('message'))[:300]}")


def wire_id(request_id: str) -> str:
    """The id in the server: with its length before it, none is the beginning of another."""
    return f"{len(request_id)}-{request_id}"
