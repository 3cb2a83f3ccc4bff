"""H55: variables that send gRPC to a proxy, on the nodes of a deployment with TLS. The LAN is named by its address."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.runtime.permissions import Role
from tests.deployed.site import RUN, Site, own_address
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, AsyncSchedulerClient, Unavailable
from turnout.scheduler.v1 import scheduler_pb2

PROXY = "http://127.0.0.1:9"
"""Nobody listens there."""

CALL = """
import sys
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, ClientOptions, RetryPolicy, Timeouts, TurnoutError
options = ClientOptions(timeouts=Timeouts(call=8.0), retry=RetryPolicy(max_attempts=1))
for target in sys.argv[1:]:
    with BufferClient(target, options) as client:
        try:
            client.calls.ListRuns(buffer_pb2.ListRunsRequest())
        except TurnoutError as error:
            print(str(error).replace(chr(10), " "))
        else:
            print("answered")
"""
VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy")
needs_an_address = pytest.mark.skipif(own_address().startswith("127."), reason="this machine has loopback alone")


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def answers(site: Site, targets: list[str], **variables: str) -> list[str]:
    """What a client in a process of its own is told by each target."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL, *targets],
        env={**clean(), **site.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def places(ground: Site) -> dict[str, str]:
    """One buffer at every kind of address."""
    port = ground.member("buffer").target.rpartition(":")[2]
    socket = f"unix:{ground.root / 's'}"
    listen = [f"--listen={host}:{port}" for host in ("127.0.0.1", "[::1]")]
    ground.member("buffer", *listen, f"--listen={socket}", listen=f"{ground.host}:{port}").start()
    return {
        "127.0.0.1": f"127.0.0.1:{port}",
        "localhost": f"localhost:{port}",
        "::1": f"[::1]:{port}",
        "socket": socket,
        "LAN": f"{ground.host}:{port}",
    }


@needs_an_address
def test_h55_this_machine_is_reached_and_elsewhere_the_variable_is_named(ground: Site, places: dict[str, str]) -> None:
    """A cluster's proxy answered for services next door."""
    told = dict(zip(places, answers(ground, list(places.values()), https_proxy=PROXY), strict=True))
    lan = told.pop("LAN")
    assert told == dict.fromkeys(told, "answered")
    assert "https_proxy" in lan


@pytest.mark.slow
@needs_an_address
@pytest.mark.parametrize("variable", VARIABLES)
def test_h55_no_proxy_is_respected(ground: Site, places: dict[str, str], variable: str) -> None:
    """As for every other program of the node; without it the error names the variable that counts."""
    every = list(places.values())
    assert set(answers(ground, every, **{variable: PROXY, "no_proxy": ground.host})) == {"answered"}
    assert variable in answers(ground, [places["LAN"]], **{variable: PROXY})[0]


@pytest.mark.slow
@needs_an_address
def test_h55_doctor_names_the_variable(ground: Site, places: dict[str, str]) -> None:
    """Whoever sees UNAVAILABLE asks it next."""
    done = ground.turnout("doctor", "--buffer", places["LAN"], https_proxy=PROXY, no_proxy="")
    assert done.returncode == 1
    assert "https_proxy" in done.stdout


CONFIG = scheduler_pb2.RunConfig(
    train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=1, group_size=1
)


@pytest.mark.slow
@needs_an_address
@pytest.mark.timeout(120)
@pytest.mark.parametrize("no_proxy", [False, True], ids=["without no_proxy", "with no_proxy"])
async def test_h55_a_deployed_scheduler_reaches_its_buffer_or_names_the_variable(site: Site, no_proxy: bool) -> None:
    """The same between services: over loopback always, over the network where no_proxy says so."""
    site.start("engine")
    buffer = site.member("buffer")
    port = buffer.target.rpartition(":")[2]
    buffer.arguments.append(f"--listen=127.0.0.1:{port}")
    buffer.start()
    scheduler = site.member("scheduler", "--peer-timeout-s=2")
    scheduler.environment = {"https_proxy": PROXY, "no_proxy": site.host if no_proxy else ""}
    scheduler.start()
    trainer = site.options(Role.TRAINER)
    async with AsyncBufferClient(buffer.target, trainer) as runs:
        await runs.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=RUN))
    async with AsyncSchedulerClient(scheduler.target, trainer) as client:

        async def opened(to_buffer: str) -> int:
            request = scheduler_pb2.OpenRunRequest(
                run_id=RUN, config=CONFIG, buffer_target=to_buffer, engine_target=site.members["engine"].target
            )
            return (await client.calls.OpenRun(request, timeout=20)).epoch

        if no_proxy:
            assert await opened(f"{site.host}:{port}") == 1
            return
        for to_buffer, peer in ((f"127.0.0.1:{port}", "ENGINE"), (f"{site.host}:{port}", "BUFFER")):
            with pytest.raises(Unavailable, match=f"{peer}_UNREACHABLE.*https_proxy"):
                await opened(to_buffer)
