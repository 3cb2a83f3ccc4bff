"""Membership as it reaches those who route by themselves, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from services.engine.settings import EngineSettings
from tests.engine.helpers import RUN, Engine, register, running
from turnout.engine.v1 import engine_pb2 as pb


class Hook:
    """A URL that keeps what is posted to it; answers with `status`, after `gate` is set."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 204
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    @property
    def routes(self) -> dict[str, str]:
        """The newest membership."""
        return {member["replica_id"]: member["route"] for member in self.got[-1]["members"]} if self.got else {}

    async def reaches(self, expected: Callable[[], bool]) -> None:
        """Wait until it knows."""
        async with asyncio.timeout(20):
            while not expected():  # noqa: ASYNC110 - what is waited for is in another thread
                await asyncio.sleep(0.01)


@contextmanager
def hook() -> Iterator[Hook]:
    """One that runs."""
    state = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.gate.wait(20)
            if state.status < 300:
                state.got.append(body)
            self.send_response(state.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/routes"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


async def open_epoch(engine: Engine) -> int:
    return (await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN))).epoch


async def begin(engine: Engine, epoch: int) -> None:
    await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=epoch, lend_id="l"))


@pytest.mark.parametrize("holds", [False, True])
async def test_held_members_are_named_to_hooks_that_hold(holds: bool) -> None:
    """The others get a lent replica when it serves, and forget their sessions then; a reclaim takes it away first."""
    with hook() as there:
        async with running(route_hook=[there.url], route_hook_holds=holds) as engine:
            epoch = await open_epoch(engine)
            await register(engine, "h")
            await register(engine, "s", "standalone")
            await there.reaches(lambda: there.routes == {"s": "serving"})
            before = there.got[-1]["sessions_cleared"]
            await begin(engine, epoch)
            version = engine.controller.fleet.routes.version
            await there.reaches(lambda: there.got[-1]["version"] >= version)
            assert there.routes == ({"s": "serving", "h": "held"} if holds else {"s": "serving"})
            assert there.got[-1]["sessions_cleared"] == before + holds
            await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, epoch=epoch, lend_id="l", weight_version=0))
            await there.reaches(lambda: there.routes == {"s": "serving", "h": "serving"})
            assert there.got[-1]["sessions_cleared"] == before + 1
            await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=epoch))
            assert there.routes == {"s": "serving"}
    assert {body["run_id"] for body in there.got} <= {"", RUN}
    versions = [body["version"] for body in there.got]
    assert versions == sorted(versions)


async def test_an_engine_is_not_stopped_before_the_hook_knows() -> None:
    with hook() as there:
        async with running(route_hook=[there.url]) as engine:
            epoch = await open_epoch(engine)
            await register(engine, "h")
            await begin(engine, epoch)
            await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, epoch=epoch, lend_id="l", weight_version=0))
            await there.reaches(lambda: there.routes == {"h": "serving"})
            there.gate.clear()
            reclaim = asyncio.ensure_future(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=epoch)))
            await asyncio.sleep(0.2)
            assert not engine.controller.fleet.get("h").replica.state.paused
            there.gate.set()
            await reclaim
            assert engine.controller.fleet.get("h").replica.confirmed_free


async def test_a_hook_that_hangs_does_not_keep_gpus_from_the_trainer() -> None:
    with hook() as there:
        async with running(route_hook=[there.url]) as engine:
            epoch = await open_epoch(engine)
            await register(engine, "h")
            await begin(engine, epoch)
            there.gate.clear()
            await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=epoch), timeout=20)
            assert engine.controller.fleet.get("h").replica.confirmed_free
            assert engine.controller.publisher.current == {there.url: False}


async def test_a_hook_that_fails_gets_the_newest_membership_later() -> None:
    with hook() as there, hook() as healthy:
        there.status = 500
        async with running(route_hook=[there.url, healthy.url]) as engine:
            await open_epoch(engine)
            await register(engine, "a", "standalone")
            await register(engine, "b", "standalone")
            await healthy.reaches(lambda: healthy.routes == {"a": "serving", "b": "serving"})
            assert there.got == []
            there.status = 200
            await there.reaches(lambda: bool(there.got))
            assert there.routes == {"a": "serving", "b": "serving"}


@pytest.mark.parametrize("urls", [["nonsense"], ["ftp://x/y"], ["http://x", "http://x"]])
def test_a_hook_that_is_no_url_is_refused(urls: list[str]) -> None:
    with pytest.raises(ValidationError):
        EngineSettings(route_hook=urls)
