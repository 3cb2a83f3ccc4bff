"""H57: deployed services that come later, restart, move, or only accept connections; TLS and tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.buffer.helpers import Caller, seconds
from tests.client.fakes import silent_listener
from tests.deployed.manifests import ROOT
from tests.deployed.site import RUN, Site, free_port
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, DeadlineExceeded, Timeouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BACK_S = 5.0
"""In which a client is to be back once the service is; tripled for a machine with other things to do."""

BUSY = 3


async def test_h57_a_client_may_come_five_seconds_before_its_service(site: Site) -> None:
    """Everything of a job starts at once, in any order."""
    buffer = site.member("buffer")
    async with AsyncBufferClient(buffer.target, site.options()) as client:
        calling = asyncio.ensure_future(client.calls.ListRuns(buffer_pb2.ListRunsRequest()))
        await asyncio.sleep(5)
        await asyncio.to_thread(buffer.start)
        began = time.monotonic()
        await calling
        assert time.monotonic() - began < BUSY * BACK_S


async def test_h57_a_wait_outlives_an_outage_of_a_minute(site: Site) -> None:
    """gRPC's own back-off grows to two minutes. The wait is armed again, once, and neither lost nor doubled."""
    buffer = site.start("buffer").members["buffer"]
    async with (
        AsyncBufferClient(buffer.target, site.options()) as client,
        site.channel(buffer.target) as channel,
    ):
        caller = Caller(channel, RUN)
        await caller.create()
        first = await client.incarnation(RUN)
        request = buffer_pb2.SampleRequest(run_id=RUN, partition="train", step=0, batch=1, max_wait=seconds(200))
        sampling = asyncio.ensure_future(client.sample(request))
        await asyncio.sleep(0.5)
        buffer.kill()
        await asyncio.sleep(60)
        assert not sampling.done()
        await asyncio.to_thread(buffer.start)
        began = time.monotonic()
        await client.calls.ListRuns(buffer_pb2.ListRunsRequest())
        assert time.monotonic() - began < BUSY * BACK_S
        await caller.finish_new("g", "other")
        assert [group.group_id for group in (await sampling).groups] == ["g"]
        ledger = await caller.ledger()
        assert (ledger.present.sampled, ledger.present.finished) == (1, 1)
        assert await client.incarnation(RUN) not in ("", first), "whoever keeps state about the service can see it"


async def test_h57_an_orderly_restart_under_a_parked_wait(site: Site) -> None:
    """As an upgrade does it."""
    buffer = site.start("buffer").members["buffer"]
    async with (
        AsyncBufferClient(buffer.target, site.options()) as client,
        site.channel(buffer.target) as channel,
    ):
        caller = Caller(channel, RUN)
        await caller.create()
        request = buffer_pb2.WaitForSampleableRequest(
            run_id=RUN, partition="train", step=0, target=1, max_wait=seconds(100)
        )
        waiting = asyncio.ensure_future(client.wait_for_sampleable(request))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(buffer.restart)
        await caller.finish_new("g")
        began = time.monotonic()
        assert (await waiting).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert time.monotonic() - began < BUSY * BACK_S


async def test_h57_a_listener_that_is_silent_ends_in_deadline_exceeded(site: Site) -> None:
    """It accepts the connection and never shakes hands, over TLS too."""
    options = site.options(timeouts=Timeouts(call=3.0, attempt=1.5, grace=0.5))
    with silent_listener() as target:
        async with AsyncBufferClient(target, options) as client:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await client.calls.ListRuns(buffer_pb2.ListRunsRequest())
            assert time.monotonic() - began < BUSY * 3.0


CALLS = """
import sys, time
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, ClientOptions, RetryPolicy, Timeouts, TurnoutError
options = ClientOptions(timeouts=Timeouts(call=1.0, attempt=1.0), retry=RetryPolicy(max_attempts=1))
with BufferClient(sys.argv[1], options) as client:
    while True:
        try:
            client.calls.ListRuns(buffer_pb2.ListRunsRequest())
            print("answered", flush=True)
        except TurnoutError as error:
            print("failed", flush=True)
        time.sleep(0.2)
"""


def own_hosts() -> bool:
    """Whether this user may give a process an /etc/hosts of its own."""
    if not shutil.which("unshare"):
        return False
    command = ["unshare", "-m", "sh", "-c", "mount --bind /etc/hosts /etc/hosts"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not own_hosts(), reason="needs a mount namespace")
def test_h57_a_name_that_changes_its_address_is_looked_up_again(tmp_path: Path) -> None:
    """A service that comes back on another node under the same name, which the client has in its hosts file."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 trainer-0\n")
    with Site(tmp_path / "site", host="127.0.0.1", identities=["trainer-0"]) as site:
        port = free_port("127.0.0.1")
        old = site.member("buffer", listen=f"127.0.0.1:{port}", name="old").start()
        client = subprocess.Popen(
            [
                *("unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts; exec "$@"', "-"),
                *(sys.executable, "-P", "-c", CALLS, f"trainer-0:{port}"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **site.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert client.stdout is not None
            _until_said(client, "answered")
            old.kill()
            _until_said(client, "failed")
            # In place: the bind holds the file.
            hosts.write_text("127.0.0.1 localhost\n127.0.0.2 trainer-0\n")
            site.member("buffer", listen=f"127.0.0.2:{port}", name="new").start()
            began = time.monotonic()
            _until_said(client, "answered")
            assert time.monotonic() - began < BUSY * BACK_S
        finally:
            client.kill()
            client.communicate()


def _until_said(client: subprocess.Popen[str], word: str) -> None:
    assert client.stdout is not None
    ends = time.monotonic() + 90
    for line in client.stdout:
        if line.strip() == word:
            return
        assert time.monotonic() < ends, f"it never {word}"
    raise AssertionError("the client ended")
