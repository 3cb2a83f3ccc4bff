"""H60: background loops of the deployed services, under a collector that never rests, each of which fails once."""

from __future__ import annotations

import asyncio
import re
import sys
import time

import pytest

from tests.buffer.helpers import Caller, seconds
from tests.deployed.site import RUN, SERVICES, Site, until
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUNS_S = 60.0
LIFE = re.compile(r"^life (\d+) of (.+)$", re.MULTILINE)
LOOPS = {
    "buffer": {"buffer expiry", "buffer journal", "buffer compaction", "buffer reserve", "tokens", "event loop lag"},
    "engine": {"tokens", "event loop lag"},
    "scheduler": {"tokens", "event loop lag"},
}
"""Some that have to be among those that failed."""


async def test_h60_loops_come_back_and_go_on_for_a_minute(site: Site) -> None:
    """Tasks that nobody holds are collected and vanish without a trace. What the sweeper and the prober are for is
    looked at from outside: claims expire, a replica that stops answering is told. No loop shows a last tick on the
    wire, so that part is left to tests/runtime.
    """
    for service in SERVICES:
        probes = ["--probe-interval=1", "--probe-timeout=2"] if service == "engine" else []
        member = site.member(service, *probes)
        member.program = (sys.executable, "-P", "-m", "tests.deployed.merciless")
    site.member("agent-standalone")
    for member in site.members.values():
        member.launch()
    for member in site.members.values():
        member.ready()
    began = time.monotonic()
    site.register()
    async with site.channel(site.members["buffer"].target) as channel:
        caller = Caller(channel)
        await caller.create(max_attempts=1000, lease_times=buffer_pb2.LeaseTimes(claim=seconds(3.0)))
        await caller.add("g")
        attempts = 0
        while time.monotonic() - began < RUNS_S:
            # The claim before this one has to be taken back first, which the sweeper does.
            (claim,) = await caller.claim(1, max_wait=15.0)
            attempts += 1
            assert claim.token.attempt == attempts
        assert attempts > 3
        await caller.ledger()
    agent = site.members["agent-standalone"]
    agent.kill()
    async with AsyncEngineClient(site.members["engine"].target, site.options()) as engine:
        for _ in until(60):
            answer = await engine.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN))
            if {replica.health for replica in answer.replicas} == {engine_pb2.REPLICA_HEALTH_DEAD}:
                break
            await asyncio.sleep(0.2)
    for service in SERVICES:
        member = site.members[service]
        assert member.stop() == 0
        said = member.said()
        lives = {name: int(number) for number, name in LIFE.findall(said)}
        assert LOOPS[service] <= set(lives)
        assert set(lives.values()) == {2}, f"each failed once, and none again: {lives}"
        assert said.count("background loop failed; restarting") == len(lives)
        for noise in ("Task was destroyed", "never awaited", "never retrieved"):
            assert noise not in said
