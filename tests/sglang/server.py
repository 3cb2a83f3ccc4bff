"""A server with SGLang's manners, held against the recorded contract of a real version.

Each request must be one that the real server takes: a known route and method, only known fields, none missing. What
kills the real scheduler kills this one: releasing with requests running, releasing twice, resuming what is there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "contract-0.5.23.json").read_text())


class SglangServer:
    """Answers as a transport. `posted` is what was changed; `missing` are routes it lacks."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.missing: set[str] = set()
        self.dead = False
        self.version = "default"
        self.paused = ""
        self.released: set[str] = set()
        self.running = 0
        self.waiting = 0
        self.in_session = False
        self.chunks: list[Any] = []
        self.fail: set[str] = set()
        self.holding: dict[str, asyncio.Event] = {}
        """Routes that are carried out once their event is set, whether or not the caller is still there."""
        self.carried_out = asyncio.Event()
        """Set when a route that was held has been."""
        self.info: dict[str, Any] = {
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": False,
            "hicache_storage_backend": None,
            "startup_time": {"total": 12.5},
            "version": CONTRACT["version"],
        }
        self.model: dict[str, Any] = {"has_image_understanding": False, "has_audio_understanding": False}

    @property
    def calls(self) -> list[str]:
        """The routes that were posted to, without the notes."""
        return [path for path, _ in self.posted if path != "/update_weight_version"]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.dead:
            raise httpx.ConnectError("refused", request=request)
        path = request.url.path
        route = CONTRACT["routes"].get(path)
        if route is None or path in self.missing:
            return httpx.Response(404)
        if request.method not in route["methods"]:
            return httpx.Response(405)
        assert set(request.url.params) <= set(route["query"]), path
        body: Any = json.loads(request.content) if request.content else None
        if route["body"] is not None and route["body"] in CONTRACT["bodies"]:
            fields = CONTRACT["bodies"][route["body"]]
            assert body is not None, path
            assert body.keys() <= fields.keys(), path
            assert all(name in body for name, field in fields.items() if field["required"]), path
        if request.method == "GET":
            return self._get(path)
        if path == "/generate":
            assert body["sampling_params"].keys() <= set(CONTRACT["sampling"])
        self.posted.append((path, body))
        if path in self.fail:
            return httpx.Response(400, json={"success": False, "message": "it was told to fail"})
        if path in self.holding:
            self._late = asyncio.ensure_future(self._hold(path, body or {}, request))
            return await asyncio.shield(self._late)
        return self._post(path, body or {}, request)

    async def _hold(self, path: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        await self.holding[path].wait()
        try:
            return self._post(path, body, request)
        finally:
            self.carried_out.set()

    def _get(self, path: str) -> httpx.Response:
        match path:
            case "/model_info":
                return httpx.Response(200, json={"weight_version": self.version, **self.model})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 64}]})
            case "/server_info":
                return httpx.Response(200, json=self.info)
            case "/v1/loads":
                load = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting}
                return httpx.Response(200, json={"loads": [load]})
            case _:
                raise AssertionError(f"a GET of {path} would change the server")

    def _post(self, path: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        idle = not self.running and (self.paused == "retract" or not self.waiting)
        match path:
            case "/pause_generation":
                assert body["mode"] in CONTRACT["pause_modes"]
                self.paused = body["mode"]
                if self.paused == "abort":
                    self.running = self.waiting = 0
                else:
                    self.running, self.waiting = 0, self.waiting + self.running
            case "/continue_generation":
                if self.released:
                    return self._die(request)
                self.paused = ""
            case "/flush_cache":
                return httpx.Response(200 if idle else 400, text="plain text")
            case "/release_memory_occupation":
                tags = set(body["tags"])
                assert tags <= set(CONTRACT["tags"])
                if not idle or tags & self.released:
                    return self._die(request)
                self.released |= tags
                return httpx.Response(200, json=None)
            case "/resume_memory_occupation":
                tags = set(body["tags"])
                if not tags <= self.released:
                    return self._die(request)
                self.released -= tags
                return httpx.Response(200, json=None)
            case "/begin_weight_update" | "/end_weight_update":
                self.in_session = path == "/begin_weight_update"
            case "/update_weights_from_distributed" | "/update_weights_from_tensor":
                if not self.in_session:
                    return httpx.Response(400, json={"success": False, "message": "no session"})
                assert body["flush_cache"] is False
            case "/update_weight_version":
                assert body["abort_all_requests"] is False
                self.version = body["new_version"]
            case "/generate":
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks]
                return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))
        return httpx.Response(200, json={"success": True, "message": "ok"})

    def _die(self, request: httpx.Request) -> httpx.Response:
        """The scheduler dies, and the front end with it."""
        self.dead = True
        raise httpx.ReadError("gone", request=request)


def chunk(ids: list[int], total: int, finish: str | None = None, logprobs: bool = True) -> dict[str, Any]:
    """A chunk of a stream with `total` tokens so far."""
    meta: dict[str, Any] = {"completion_tokens": total, "cached_tokens": 0}
    meta["finish_reason"] = None if finish is None else {"type": finish}
    if logprobs:
        meta["output_token_logprobs"] = [[-float(each), each, None] for each in ids]
    return {"output_ids": ids, "meta_info": meta}
