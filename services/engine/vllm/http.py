"""A running vLLM API server with its development routes (VLLM_SERVER_DEV_MODE=1), spoken to over HTTP.

Invariants: every query name is one that the server reads, since it ignores others without a word; a route is offered
if a GET of it is refused for its method, which changes nothing. Others may use the server too: its counts come from its
metrics, and what they did to its memory from the state of its last sleep.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.engine.backends.base import engine_dead
from services.engine.domain.requests import Finish
from services.engine.domain.spec import KV_CACHE
from services.engine.guarded import surface as calls
from services.engine.guarded.http import HttpServer, read_object
from services.engine.guarded.residency import TAGS
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.engine.vllm.memory import MEMORY_METHOD, read_memory
from services.runtime.errors import TurnoutError, aborted, failed_precondition
from services.runtime.tasks import together

DESCRIBE_S: Final = 60.0
"""Wall seconds for /server_info, which starts programs to describe its machine when it is asked first."""

ROUTES: Final = {
    calls.SLEEP: "/sleep",
    calls.WAKE_TAGS: "/wake_up",
    calls.RELEASE_KV: "/release_kv_cache_memory",
    calls.PAUSE: "/pause",
    calls.RESET_RUNNING: "/reset_prefix_cache",
    calls.RESET_MM: "/reset_mm_cache",
    calls.RESET_ENCODER: "/reset_encoder_cache",
    calls.COLLECTIVE_RPC: "/collective_rpc",
    calls.RELOAD: "/collective_rpc",
    calls.WEIGHT_TRANSFER: "/update_weights",
    calls.WEIGHT_FILES: "/update_weights",
    calls.WEIGHT_SESSIONS: "/start_weight_update",
    calls.WEIGHT_VERSION: "/update_weight_version",
}
"""The POST routes behind the calls."""

ABORT_ROUTE: Final = "/abort_requests"
FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT, "repetition": Finish.STOP}


async def connect(
    url: str, transport: httpx.AsyncBaseTransport | None = None, tls: ssl.SSLContext | None = None
) -> HttpSurface:
    """Look at a server; UNAVAILABLE / ENGINE_UNREACHABLE if none answers, FAILED_PRECONDITION if its routes are off."""
    surface = HttpSurface(url, transport, tls)
    try:
        await surface.find_out()
    except BaseException:
        await surface.close()
        raise
    return surface


class HttpSurface:
    """One API server."""

    tags = TAGS
    schedules_when_awake = True

    def __init__(
        self, url: str, transport: httpx.AsyncBaseTransport | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = HttpServer(url, transport, check=self.check, tls=tls)
        self.url = self._server.url
        self.offers: frozenset[str] = frozenset()
        self.vocabulary: int | None = None
        self.longest: int | None = None
        self.text_only = False
        self.incarnation = ""
        self._model = ""

    async def find_out(self) -> None:
        """Ask the server what it is and has."""
        models = (await self._server.get("/v1/models")).json()["data"]
        if not models:
            raise failed_precondition("NO_MODEL", f"{self.url} serves no model")
        self._model = models[0]["id"]
        self.longest = models[0].get("max_model_len")
        offers = {call for call, route in ROUTES.items() if await self._has(route)}
        if calls.PAUSE not in offers or not await self._has(ABORT_ROUTE):
            raise failed_precondition(
                "DEV_MODE_OFF", f"{self.url} lacks /pause or {ABORT_ROUTE}: start it with VLLM_SERVER_DEV_MODE=1"
            )
        # The routes with these query names came together with /pause?mode=.
        offers |= {calls.PAUSE_MODE, calls.KEEP, calls.SLEEP_MODE, calls.IS_PAUSED}
        if calls.RESET_RUNNING in offers:
            offers |= {calls.RESET_CONNECTORS}
        config = await self._server_config()
        self._read_config(config, offers)
        self.offers = frozenset(offers)
        if calls.COLLECTIVE_RPC in offers:
            await self._find_extension()
        if self.vocabulary is None and not self._has_tokenizer(config):
            raise failed_precondition(
                "VOCABULARY_UNKNOWN",
                f"{self.url} has no tokenizer, so a wrong token id would kill it: start it with one, or with "
                "--worker-extension-cls services.engine.vllm.extension.WorkerExtension",
            )
        self.incarnation = str((await self._metrics()).get("process_start_time_seconds", ""))

    @staticmethod
    def _has_tokenizer(config: Mapping[str, Any]) -> bool:
        """Whether the server judges token ids by itself, which it does by its tokenizer."""
        return (config.get("model_config") or {}).get("skip_tokenizer_init") is False

    def _read_config(self, config: Mapping[str, Any], offers: set[str]) -> None:
        model = config.get("model_config") or {}
        self.text_only = not model.get("multimodal_config")
        worker = str((config.get("parallel_config") or {}).get("worker_cls", ""))
        if not (model.get("enable_sleep_mode") or worker.endswith("SleepingCpuWorker")):
            offers -= {calls.SLEEP, calls.SLEEP_MODE, calls.RELEASE_KV}
        if not config.get("weight_transfer_config"):
            offers -= {calls.WEIGHT_TRANSFER, calls.WEIGHT_FILES, calls.WEIGHT_SESSIONS}

    async def _server_config(self) -> Mapping[str, Any]:
        answer = await self._server.get("/server_info", {"config_format": "json"}, DESCRIBE_S)
        config = answer.json().get("vllm_config")
        return config if isinstance(config, dict) else {}

    async def _find_extension(self) -> None:
        try:
            facts = await self.collective_rpc("turnout_facts", (), {})
            self.vocabulary = facts[0]["vocabulary"]
        except TurnoutError as error:
            if error.reason == "ENGINE_DEAD":
                raise
        else:
            self.offers |= {calls.MEMORY}

    async def _has(self, route: str) -> bool:
        return await self._server.has(route, by="GET")

    # ---------------------------------------------------------------------------------------------------------- reads

    async def check(self) -> None:
        if await self._server.sign_of_life("/health") == HTTPStatus.SERVICE_UNAVAILABLE:
            raise engine_dead(f"the engine behind {self.url} has died")

    async def unfinished(self) -> int:
        metrics = await self._metrics()
        return int(metrics.get("vllm:num_requests_running", 0) + metrics.get("vllm:num_requests_waiting", 0))

    async def read(self, memory: bool = True) -> Reading:
        asleep, paused, version, workers, metrics = await together(
            self._told("/is_sleeping", calls.SLEEP),
            self._told("/is_paused", calls.IS_PAUSED),
            self._told("/weight_info", calls.WEIGHT_VERSION),
            self.collective_rpc(MEMORY_METHOD, (), {}) if memory and calls.MEMORY in self.offers else _nothing(),
            self._metrics(),
        )
        tags, level = _last_sleep(metrics)
        used, tagged = (None, None) if workers is None else read_memory(workers)
        return Reading(
            asleep=asleep.get("is_sleeping"),
            paused=paused.get("is_paused"),
            asleep_tags=tags,
            sleep_level=level,
            unfinished=int(metrics.get("vllm:num_requests_running", 0) + metrics.get("vllm:num_requests_waiting", 0)),
            weight_version=version.get("weight_version"),
            memory_bytes=used,
            tagged_bytes=tagged,
        )

    async def _told(self, path: str, call: str) -> dict[str, Any]:
        """What a GET answers, nothing if the server does not offer it."""
        return read_object(await self._server.get(path)) if call in self.offers else {}

    async def _metrics(self) -> dict[str, float]:
        """The samples we need, summed over engines; those of a state by `name{state}`."""
        found: dict[str, float] = {}
        lines = (await self._server.get("/metrics")).text.splitlines(keepends=True)
        # There are thousands of others, and the parser is slow.
        ours = "".join(line for line in lines if line.removeprefix("# TYPE ").startswith(_METRICS))
        for family in text_string_to_metric_families(ours):
            for sample in family.samples:
                state = sample.labels.get("sleep_state", "")
                key = f"{sample.name}{{{state}}}" if state else sample.name
                found[key] = found.get(key, 0.0) + sample.value
        return found

    # -------------------------------------------------------------------------------------------------------- commands

    async def sleep(self, level: int, mode: str) -> None:
        answer = await self._server.post("/sleep", {"level": str(level), "mode": mode})
        told = read_object(answer).get("level", level)
        if told != level:
            raise aborted("ENGINE_FAILED", f"{self.url} slept at level {told}, not {level}")

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self._server.post("/wake_up", [("tags", tag) for tag in tags or ()])

    async def release_kv_cache(self) -> None:
        await self._server.post("/release_kv_cache_memory")

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._server.post("/pause", {"mode": mode, "clear_cache": _flag(clear_cache)})

    async def resume(self) -> None:
        await self._server.post("/resume")

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        query = {"reset_running_requests": _flag(running), "reset_external": _flag(connectors)}
        # Older servers answer nothing at all; that is no "false".
        return read_object(await self._server.post("/reset_prefix_cache", query)).get("success", True) is not False

    async def reset_mm_cache(self) -> None:
        await self._server.post("/reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._server.post("/reset_encoder_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs)}
        answer = await self._server.post("/collective_rpc", body=body)
        return list(read_object(answer).get("results") or ())

    # --------------------------------------------------------------------------------------------------------- weights

    async def reload_weights(self, path: str) -> None:
        await self.collective_rpc("reload_weights", (), {"weights_path": path})

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        await self._server.post("/init_weight_transfer_engine", body={"init_info": dict(info)})

    async def start_update(self) -> None:
        await self._server.post("/start_weight_update")

    async def update_weights(self, info: Any) -> None:
        await self._server.post("/update_weights", body={"update_info": info})

    async def finish_update(self) -> None:
        await self._server.post("/finish_weight_update", body={})

    async def set_version(self, version: str) -> None:
        await self._server.post("/update_weight_version", body={"new_version": version})

    # ------------------------------------------------------------------------------------------------------ generation

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        # The engine knows a completion by an id of its own making; any other is answered 200 and ends nothing.
        body = {} if request_ids is None else {"request_ids": [f"cmpl-{each}-0" for each in request_ids]}
        await self._server.post(ABORT_ROUTE, body=body)

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k,
            "stop_token_ids": list(draw.stop_token_ids),
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if draw.seed is not None:
            body["seed"] = draw.seed
        if draw.logprobs:
            body["logprobs"] = 0
        async with aclosing(self._server.stream("/v1/completions", body, {"X-Request-Id": request_id})) as chunks:
            async for chunk in chunks:
                tokens = self._read_chunk(chunk, draw.logprobs)
                if tokens is not None:
                    yield tokens
                    if tokens.finish is not None:
                        return
        # A request that is aborted before its first token ends without a chunk that says so.
        yield Tokens((), (), Finish.ABORT)

    def _read_chunk(self, chunk: Mapping[str, Any], logprobs: bool) -> Tokens | None:
        if "error" in chunk:
            raise aborted("ENGINE_FAILED", f"{self.url} failed in a request: {str(chunk['error'])[:300]}")
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        ids = choice.get("token_ids") or ()
        values: Sequence[float] = ()
        if logprobs and ids:
            values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            if len(values) != len(ids):
                raise aborted("ENGINE_FAILED", f"{self.url} gave {len(values)} log-probabilities for {len(ids)} tokens")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in FINISHES:
            raise aborted("ENGINE_FAILED", f"{self.url} ended a request with {reason!r}")
        return Tokens(ids, values, FINISHES[reason] if reason is not None else None)

    async def close(self) -> None:
        await self._server.close()


_METRICS: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:engine_sleep_state",
    "process_start_time_seconds",
)


def _last_sleep(metrics: Mapping[str, float]) -> tuple[frozenset[str] | None, int | None]:
    """Which tags the last sleep freed, and its level; None if the server does not tell."""
    awake = metrics.get("vllm:engine_sleep_state{awake}")
    if awake is None:
        return None, None
    if awake:
        return frozenset(), 0
    if metrics.get("vllm:engine_sleep_state{discard_all}"):
        return TAGS, 2
    return (TAGS, 1) if metrics.get("vllm:engine_sleep_state{weights_offloaded}") else (frozenset({KV_CACHE}), 0)


async def _nothing() -> None:
    return None


def _flag(value: bool) -> str:
    return "true" if value else "false"
