"""The HTTP surface against a scripted server with the manners of vLLM's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.engine.domain.requests import Finish
from services.engine.guarded import surface as calls
from services.engine.guarded.surface import Draw, Tokens
from services.engine.vllm.http import HttpSurface, connect
from services.runtime.errors import TurnoutError

DRAW = Draw(10, 1.0, 1.0, 0, 7, (), True)
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 1.0
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}
vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} {offloaded}
vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} {discarded}
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1700000000.5
"""
POSTS = (
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/update_weights",
    "/start_weight_update",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/update_weight_version",
    "/abort_requests",
)
Answer = Callable[[httpx.Request], httpx.Response]


class Server:
    """Answers by path; what was posted is kept. `answers` replaces an answer, `missing` are routes it lacks."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, list[str]], Any]] = []
        self.answers: dict[str, Answer] = {}
        self.missing: set[str] = set()
        self.sleep = {"awake": 1.0, "offloaded": 0.0, "discarded": 0.0}
        self.memory: list[dict[str, Any]] | None = [{"pid": 1, "used": 1000, "tags": {"weights": 400, "kv_cache": 500}}]
        self.config: dict[str, Any] = {
            "model_config": {"enable_sleep_mode": True, "skip_tokenizer_init": True},
            "weight_transfer_config": {"backend": "nccl"},
        }

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in self.missing:
            return httpx.Response(404)
        if path in self.answers:
            return self.answers[path](request)
        if path in POSTS:
            if request.method == "GET":
                return httpx.Response(405)
            body = json.loads(request.content) if request.content else None
            query = {name: request.url.params.get_list(name) for name in request.url.params}
            if body is None or not str(body.get("method", "")).startswith("turnout_"):
                self.posted.append((path, query, body))
            return self._post(path, body)
        return self._get(path)

    def _post(self, path: str, body: Any) -> httpx.Response:
        if path == "/collective_rpc":
            if not body["method"].startswith("turnout_"):
                return httpx.Response(200, json={"results": [None]})
            if body["method"] == "turnout_facts" and self.memory is not None:
                return httpx.Response(200, json={"results": [{"vocabulary": 1000}]})
            return httpx.Response(500) if self.memory is None else httpx.Response(200, json={"results": self.memory})
        if path == "/reset_prefix_cache":
            return httpx.Response(200, json={"success": True})
        return httpx.Response(200, json={})

    def _get(self, path: str) -> httpx.Response:
        match path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny", "max_model_len": 64}]})
            case "/server_info":
                return httpx.Response(200, json={"vllm_config": self.config})
            case "/metrics":
                return httpx.Response(200, text=METRICS.format(**self.sleep))
            case "/is_sleeping":
                return httpx.Response(200, json={"is_sleeping": not self.sleep["awake"]})
            case "/is_paused":
                return httpx.Response(200, json={"is_paused": False})
            case "/weight_info":
                return httpx.Response(200, json={"weight_version": "5"})
            case "/health":
                return httpx.Response(200)
            case _:
                return httpx.Response(404)


async def connected(server: Server) -> HttpSurface:
    surface = await connect("http://engine/", httpx.MockTransport(server))
    server.posted.clear()
    return surface


async def reason(call: Any) -> str:
    with pytest.raises(TurnoutError) as caught:
        await call
    return caught.value.reason


async def test_a_gateway_with_a_status_of_its_own_is_a_sign_of_life() -> None:
    """520 is in no standard: reading it was a failure of the controller, twice a second."""
    server = Server()
    surface = await connected(server)
    server.answers["/health"] = lambda _: httpx.Response(520)
    await surface.check()


async def test_a_reading_that_fails_leaves_no_question_open() -> None:
    """Workers that hang while another route fails: each probe left a connection behind, until there were none."""
    server, asked, given_up = Server(), asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async def answer(request: httpx.Request) -> httpx.Response:
        if server.answers and request.url.path == "/collective_rpc":
            await hang()
        if server.answers and request.url.path == "/is_paused":
            await asked.wait()
        return await server(request)

    surface = await connect("http://engine/", httpx.MockTransport(answer))
    server.answers["/is_paused"] = lambda _: httpx.Response(500)
    assert await reason(surface.read()) == "ENGINE_FAILED"
    assert given_up.is_set()


async def test_a_server_is_asked_what_it_has() -> None:
    surface = await connected(Server())
    assert surface.offers >= {calls.SLEEP, calls.RELEASE_KV, calls.WEIGHT_TRANSFER, calls.WEIGHT_VERSION, calls.MEMORY}
    assert (surface.vocabulary, surface.longest, surface.text_only) == (1000, 64, True)
    assert surface.incarnation == "1700000000.5"


async def test_finding_out_posts_nothing_that_changes_the_server() -> None:
    server = Server()
    await connect("http://engine", httpx.MockTransport(server))
    assert server.posted == []


async def test_routes_that_are_missing_are_not_offered() -> None:
    """An older server: no KV release, no versions, none of our worker methods, no sleep mode, no weight transfer."""
    server = Server()
    server.missing = {"/release_kv_cache_memory", "/update_weight_version", "/weight_info"}
    server.memory = None
    server.config = {"model_config": {"skip_tokenizer_init": False}}
    surface = await connected(server)
    absent = {calls.RELEASE_KV, calls.WEIGHT_VERSION, calls.MEMORY, calls.SLEEP, calls.WEIGHT_TRANSFER}
    assert not surface.offers & absent
    assert (await surface.read()).weight_version is None


async def test_a_server_that_judges_no_token_ids_is_refused() -> None:
    """One outside the vocabulary would kill it, and nobody knows the vocabulary."""
    server = Server()
    server.memory = None
    assert await reason(connect("http://engine", httpx.MockTransport(server))) == "VOCABULARY_UNKNOWN"


@pytest.mark.parametrize("missing", ["/pause", "/abort_requests"])
async def test_a_server_without_development_routes_is_refused(missing: str) -> None:
    server = Server()
    server.missing = {missing}
    assert await reason(connect("http://engine", httpx.MockTransport(server))) == "DEV_MODE_OFF"


async def test_query_names_are_those_that_the_server_reads() -> None:
    """It ignores all others without a word."""
    server = Server()
    surface = await connected(server)
    await surface.sleep(2, "abort")
    await surface.wake_up(["weights", "kv_cache"])
    await surface.wake_up(None)
    await surface.pause("keep", False)
    await surface.reset_prefix_cache(True, True)
    assert server.posted == [
        ("/sleep", {"level": ["2"], "mode": ["abort"]}, None),
        ("/wake_up", {"tags": ["weights", "kv_cache"]}, None),
        ("/wake_up", {}, None),
        ("/pause", {"mode": ["keep"], "clear_cache": ["false"]}, None),
        ("/reset_prefix_cache", {"reset_running_requests": ["true"], "reset_external": ["true"]}, None),
    ]


async def test_aborts_name_requests_as_the_engine_does() -> None:
    """Another id is answered 200 and ends nothing; an empty body ends everything."""
    server = Server()
    surface = await connected(server)
    await surface.abort(["a"])
    await surface.abort(None)
    assert [body for _, _, body in server.posted] == [{"request_ids": ["cmpl-a-0"]}, {}]


async def test_weights_travel_under_their_names() -> None:
    server = Server()
    surface = await connected(server)
    await surface.init_transfer({"a": 1})
    await surface.start_update()
    await surface.update_weights({"b": 2})
    await surface.finish_update()
    await surface.set_version("7")
    bodies = [body for _, _, body in server.posted]
    assert bodies == [{"init_info": {"a": 1}}, None, {"update_info": {"b": 2}}, {}, {"new_version": "7"}]


async def test_an_answer_that_carries_an_error_is_no_success() -> None:
    server = Server()
    surface = await connected(server)
    server.answers["/resume"] = lambda _: httpx.Response(200, json={"error": "Failed to resume generation"})
    assert await reason(surface.resume()) == "ENGINE_FAILED"
    server.answers["/sleep"] = lambda _: httpx.Response(200, json={"status": "sleeping", "level": 1})
    assert await reason(surface.sleep(2, "abort")) == "ENGINE_FAILED"
    server.answers["/reset_prefix_cache"] = lambda _: httpx.Response(200, json={"success": False})
    assert not await surface.reset_prefix_cache(False, False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (500, "ENGINE_FAILED"),
        (503, "ENGINE_BUSY"),
        (400, "ENGINE_REFUSED"),
        (422, "ENGINE_REFUSED"),
        (404, "NOT_OFFERED"),
        (401, "ENGINE_KEY_NEEDED"),
    ],
)
async def test_statuses_have_their_meaning(status: int, expected: str) -> None:
    server = Server()
    surface = await connected(server)
    server.answers["/resume"] = lambda _: httpx.Response(status, text="because")
    assert await reason(surface.resume()) == expected


async def test_a_server_that_is_gone_is_dead_and_one_that_is_slow_is_not() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    server = Server()
    surface = await connected(server)
    server.answers["/health"] = slow
    await surface.check()
    server.answers["/health"] = gone
    assert await reason(surface.check()) == "ENGINE_DEAD"
    server.answers["/health"] = lambda _: httpx.Response(503)
    assert await reason(surface.check()) == "ENGINE_DEAD"


@pytest.mark.parametrize(
    ("state", "tags", "level"),
    [
        ({"awake": 1.0, "offloaded": 0.0, "discarded": 0.0}, frozenset(), 0),
        ({"awake": 0.0, "offloaded": 1.0, "discarded": 0.0}, frozenset({"weights", "kv_cache"}), 1),
        ({"awake": 0.0, "offloaded": 0.0, "discarded": 1.0}, frozenset({"weights", "kv_cache"}), 2),
        ({"awake": 0.0, "offloaded": 0.0, "discarded": 0.0}, frozenset({"kv_cache"}), 0),
    ],
)
async def test_what_the_last_sleep_was_is_in_the_metrics(
    state: dict[str, float], tags: frozenset[str], level: int
) -> None:
    server = Server()
    server.sleep = state
    reading = await (await connected(server)).read()
    assert (reading.asleep_tags, reading.sleep_level, reading.unfinished) == (tags, level, 3)
    assert (reading.memory_bytes, reading.tagged_bytes) == (1000, {"weights": 400, "kv_cache": 500})


def stream(*chunks: dict[str, Any] | str) -> Answer:
    lines = "".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks)
    return lambda _: httpx.Response(200, text=lines)


def choice(ids: list[int], logprobs: list[float], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}]}


async def test_output_is_read_as_token_ids() -> None:
    server = Server()
    surface = await connected(server)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return stream(choice([1, 2], [-0.5, -0.25]), {"choices": []}, choice([3], [-1.0], "length"), "[DONE]")(request)

    server.answers["/v1/completions"] = answer
    got = [tokens async for tokens in surface.generate("a", [5, 6], DRAW)]
    assert got == [Tokens([1, 2], [-0.5, -0.25]), Tokens([3], [-1.0], Finish.LENGTH)]
    body = json.loads(asked[0].content)
    assert asked[0].headers["x-request-id"] == "a"
    assert (body["prompt"], body["max_tokens"], body["seed"], body["logprobs"]) == ([5, 6], 10, 7, 0)


async def test_a_request_aborted_before_its_first_token_is_aborted() -> None:
    """The server ends its stream without a chunk that says so."""
    server = Server()
    surface = await connected(server)
    server.answers["/v1/completions"] = stream("[DONE]")
    assert [tokens async for tokens in surface.generate("a", [5], DRAW)] == [Tokens((), (), Finish.ABORT)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (stream({"error": {"message": "out of memory"}}), "ENGINE_FAILED"),
        (stream(choice([1, 2], [-0.5])), "ENGINE_FAILED"),
        (stream(choice([1], [-0.5], "error")), "ENGINE_FAILED"),
        (stream(choice([1], [-0.5])), "ENGINE_ENDED_STREAM"),
        (lambda _: httpx.Response(400, text="too long"), "ENGINE_REFUSED"),
        (lambda _: httpx.Response(503, text="paused"), "ENGINE_BUSY"),
    ],
)
async def test_streams_that_fail_are_errors(answer: Answer, expected: str) -> None:
    server = Server()
    surface = await connected(server)
    server.answers["/v1/completions"] = answer

    async def read() -> None:
        async for _ in surface.generate("a", [5], DRAW):
            pass

    assert await reason(read()) == expected
