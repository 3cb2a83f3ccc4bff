"""H37 and H38: a deployed controller under 2 000 requests, and with agents that are stopped, hung and dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from services.runtime.permissions import Role
from services.runtime.statuses import from_rpc_error
from tests.deployed.site import Site
from tests.deployed.test_health import check
from tests.engine.helpers import RUN, update
from turnout.engine.v1 import engine_pb2, engine_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUESTS = 2000
READS = 100
SMALL = ("--weights-bytes=65536", "--kv-bytes=65536")
LONG_S = 10.0
"""What each request takes at least."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site of the run that the helpers speak of."""
    with Site(tmp_path / "site", run_id=RUN) as made:
        yield made


def stub_of(channel: grpc.aio.Channel) -> Any:
    return engine_pb2_grpc.EngineControllerStub(channel)


async def timed(call: Any) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began


async def test_h37_control_does_not_queue_behind_two_thousand_requests(site: Site) -> None:
    """A weight sync waited on requests that could not finish. Reads and Health take a fraction of what a request takes,
    and Pause reaches the engines; what they took is printed, as the limits of the case are for an unloaded machine.
    """
    site.member("engine")
    site.member("agent-standalone", *SMALL, "--decode-base=0.01", "--length-mean=30000")
    for member in site.members.values():
        member.start()
    site.register()
    target = site.members["engine"].target
    async with site.channel(target) as control, site.channel(target, Role.WORKER) as traffic:
        stub = stub_of(control)
        everyone = engine_pb2.ReplicaSelector(replica_ids=["s0", "s1"])
        await update(SimpleNamespace(stub=stub), everyone, 1)  # type: ignore[arg-type]
        running = [asyncio.create_task(_generate(stub_of(traffic), number)) for number in range(REQUESTS)]
        listed = engine_pb2.ListReplicasRequest(run_id=RUN)
        async with asyncio.timeout(120):
            while sum(one.running for one in (await stub.ListReplicas(listed)).replicas) < REQUESTS:
                assert not [task for task in running if task.done()]
                await asyncio.sleep(0.1)
        reads = [await timed(stub.ListReplicas(listed, timeout=20)) for _ in range(READS)]
        checks = [await timed(check(control)) for _ in range(READS)]
        keep = engine_pb2.PauseRequest(run_id=RUN, mode=engine_pb2.PAUSE_MODE_KEEP)
        reached = await timed(stub.Pause(keep, timeout=60))
        await stub.Resume(engine_pb2.ResumeRequest(run_id=RUN), timeout=60)
        # This one has to bring home what two thousand requests have so far before it answers.
        drained = await timed(stub.Pause(engine_pb2.PauseRequest(run_id=RUN), timeout=60))
        assert {task.exception() for task in running if task.done()} <= {None}, "none of the requests was lost"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    p99 = {name: statistics.quantiles(times, n=100)[98] for name, times in (("status", reads), ("health", checks))}
    figures = ", ".join(f"{name} p99 {1000 * value:.0f} ms" for name, value in p99.items())
    print(f"{figures}, Pause {1000 * reached:.0f} ms, drained {drained:.1f} s, load {os.getloadavg()[0]:.0f}")
    assert max(p99.values()) < LONG_S / 5
    assert reached < LONG_S / 2


async def _generate(stub: Any, number: int) -> int:
    request = engine_pb2.GenerateRequest(
        run_id=RUN,
        request_id=f"r{number}",
        prompt_token_ids=[1, 2, 3],
        max_tokens=20_000,
        delta_tokens=1_000_000,
    )
    call = stub.Generate(request)
    async for event in call:
        if event.WhichOneof("event") == "done":
            return int(event.done.finish_reason)
    return 0


async def test_h38_stopped_hung_and_dead_agents_are_told_apart_and_delay_nobody(site: Site) -> None:
    """One keeps its connection and answers nothing, one answers probes and no command, one is killed, one is well."""
    names = ("stopped", "hung", "killed", "well")
    site.member("engine", "--probe-interval=1", "--probe-timeout=2")
    for name in names:
        faults = ("--fault-injection", "--allow-method=fault_hang", "--allow-method=fault_heal")
        site.member("agent-hybrid", *SMALL, *faults, name=name, replicas=[f"{name}:hybrid"])
    for member in site.members.values():
        member.launch()
    for member in site.members.values():
        member.ready()
    site.register()
    async with site.channel(site.members["hung"].target) as channel:
        hang = engine_pb2.CollectiveRpcRequest(
            run_id=RUN, method="fault_hang", arguments_json=json.dumps({"kwargs": {}})
        )
        await stub_of(channel).CollectiveRpc(hang, timeout=10)
    os.kill(site.members["stopped"].pid, signal.SIGSTOP)
    site.members["killed"].kill()
    try:
        async with site.channel(site.members["engine"].target) as channel:
            stub = stub_of(channel)
            healthy, unresponsive, dead = (
                engine_pb2.REPLICA_HEALTH_HEALTHY,
                engine_pb2.REPLICA_HEALTH_UNRESPONSIVE,
                engine_pb2.REPLICA_HEALTH_DEAD,
            )
            await _are(stub, {"stopped": unresponsive, "hung": healthy, "killed": dead, "well": healthy})
            sleep = engine_pb2.SleepRequest(run_id=RUN)
            sleep.timeout.FromSeconds(3)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Sleep(sleep, timeout=60)
            error = from_rpc_error(caught.value)
            assert error.reason == "PARTIAL"
            request = engine_pb2.GetOperationRequest(run_id=RUN, operation_id=error.metadata["operation_id"])
            operation = (await stub.GetOperation(request)).operation
            codes = {outcome.replica_id: outcome.code for outcome in operation.outcomes}
            took = {outcome.replica_id: outcome.duration.ToMilliseconds() for outcome in operation.outcomes}
            assert codes["well"] == 0
            assert took["well"] < took["hung"]
            for name in ("stopped", "hung", "killed"):
                assert codes[name] in (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], grpc.StatusCode.UNAVAILABLE.value[0])
            await _are(stub, {"stopped": unresponsive, "hung": unresponsive, "killed": dead, "well": healthy})
            # One that is well is enough to serve; without it there is nobody.
            assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
            os.kill(site.members["well"].pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                while await check(channel) != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
    finally:
        for name in ("stopped", "well"):
            os.kill(site.members[name].pid, signal.SIGCONT)


async def _are(stub: Any, wanted: dict[str, int]) -> None:
    async with asyncio.timeout(60):
        while True:
            answer = await stub.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN), timeout=20)
            if {one.spec.replica_id: one.health for one in answer.replicas} == wanted:
                return
            await asyncio.sleep(0.1)
