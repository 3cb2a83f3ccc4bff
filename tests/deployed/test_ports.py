"""H47 and H56: where the deployed services listen, and what they say where they cannot."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.buffer.helpers import Caller
from tests.deployed.manifests import ROOT
from tests.deployed.site import SERVICES, TURNOUT, Member, NotStarted, Site, free_port

CALL = """
import sys
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient
for target in sys.argv[1:]:
    with BufferClient(target) as client:
        client.calls.ListRuns(buffer_pb2.ListRunsRequest())
    print(target)
"""


async def serves(site: Site, member: Member) -> bool:
    """Whether a buffer answers at this member's address."""
    async with site.channel(member.target) as channel:
        caller = Caller(channel)
        await caller.create()
        return (await caller.depth()).sampleable == 0


async def test_h47_no_second_service_gets_the_port_of_a_deployed_buffer(site: Site) -> None:
    """Two servers on one port answer by turns. Buffer twice, the scheduler, the controller, all with TLS."""
    buffer = site.start("buffer").members["buffer"]
    seconds = [site.member(service, listen=buffer.target, name=f"second-{service}") for service in SERVICES]
    for second in seconds:
        second.launch()
    for second in seconds:
        with pytest.raises(NotStarted) as caught:
            second.ready()
        assert caught.value.code == 1
        (line,) = caught.value.errors.splitlines()
        assert line.endswith(f"cannot listen on {buffer.target}: address in use")
    assert await serves(site, buffer)


@pytest.mark.slow
async def test_h47_port_0_is_printed_and_each_gets_its_own(site: Site) -> None:
    """A script has no other way to learn it."""
    first, second = (site.member("buffer", listen=f"{site.host}:0", name=name).start() for name in ("one", "two"))
    assert first.target != second.target
    assert not first.target.endswith(":0")
    for member in (first, second):
        assert await serves(site, member)


@pytest.mark.slow
async def test_h47_a_socket_in_use_is_left_alone_and_a_stale_one_taken_over(site: Site, tmp_path: Path) -> None:
    """gRPC itself would delete the file of a socket that somebody serves on."""
    path = f"unix:{tmp_path / 's'}"
    first = site.member("buffer", listen=path, name="first").start()
    for service in ("buffer", "scheduler"):
        with pytest.raises(NotStarted, match="address in use"):
            site.member(service, listen=path, name=f"second-{service}").start()
    assert await serves(site, first)
    first.kill()
    assert (tmp_path / "s").exists()
    assert await serves(site, site.member("buffer", listen=path, name="after").start())


# ---------------------------------------------------------------------------------------------------------------- H56


def refused(*flags: str, before: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and stderr of a buffer that is to be refused its address."""
    done = subprocess.run(
        [*before, *TURNOUT, "buffer", "serve", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("::1:50051", "is ambiguous: write an IPv6 address in brackets"),
        ("127.0.0.1:65536", "is not a number from 0 to 65535"),
        ("127.0.0.1:-1", "is not a number from 0 to 65535"),
        ("127.0.0.1", "has no port"),
        ("no-such-host.invalid:0", "unknown host"),
    ],
)
def test_h56_a_wrong_address_is_one_line(address: str, why: str) -> None:
    """And no traceback of gRPC's, which names neither the address nor the fault."""
    code, said = refused("--listen", address, "--insecure")
    assert code in (1, 2)
    assert len(said.splitlines()) == 1
    assert why in said


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("setpriv") or os.getuid() != 0, reason="only root can give up the privilege")
def test_h56_a_privileged_port_is_refused_in_one_line() -> None:
    """A container without NET_BIND_SERVICE."""
    without = (
        "unshare",
        "-n",
        "sh",
        "-c",
        'ip link set lo up; exec setpriv --bounding-set=-net_bind_service "$@"',
        "-",
    )
    code, said = refused("--listen", "127.0.0.1:81", before=without)
    assert code == 1
    assert said.endswith("cannot listen on 127.0.0.1:81: permission denied")


def namespaces() -> bool:
    """Whether this user may make a network of its own."""
    if not (shutil.which("unshare") and shutil.which("ip") and shutil.which("nsenter")):
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def networked(setup: str, *listen: str) -> Iterator[tuple[int, list[str]]]:
    """A buffer in a network of its own, and the addresses that it prints; `setup` is a line for the shell."""
    flags = [word for address in listen for word in ("--listen", address)]
    process = subprocess.Popen(
        [
            "unshare",
            "-n",
            "-m",
            "sh",
            "-c",
            f'{setup}; exec "$@"',
            "-",
            *TURNOUT,
            "buffer",
            "serve",
            "--insecure",
            *flags,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in listen or ("default",)]
        targets = [match[1] for line in lines if (match := re.search(r"listening on (\S+)", line))]
        yield process.pid, targets
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def called(pid: int, targets: Sequence[str]) -> list[str]:
    """The targets that answer a client in the network of a process."""
    command = ["nsenter", "-t", str(pid), "-n", "-m", sys.executable, "-P", "-c", CALL, *targets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


BOTH = "ip link set lo up"
IPV4 = f"{BOTH}; sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.lo.disable_ipv6=1"
IPV6 = (
    f"{BOTH}; ip -6 addr add fd00::7/64 dev lo; ip addr del 127.0.0.1/8 dev lo; mount -t tmpfs tmpfs /mnt; "
    "echo ::1 localhost > /mnt/hosts; mount --bind /mnt/hosts /etc/hosts"
)


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="needs unshare, ip and nsenter")
@pytest.mark.parametrize("setup", [BOTH, IPV4], ids=["both", "without IPv6"])
def test_h56_the_default_address_works_with_and_without_ipv6(setup: str) -> None:
    """The default is 127.0.0.1, which is there in an IPv6-only container too, as the kernel gives it to `lo`."""
    with networked(setup) as (pid, targets):
        assert targets == ["127.0.0.1:50051"]
        assert called(pid, targets) == targets


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="needs unshare, ip and nsenter")
@pytest.mark.parametrize(
    ("setup", "listen"),
    [
        (BOTH, ("0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0", "localhost:0", "127.0.0.1:65535")),
        (IPV4, ("0.0.0.0:0", "[::]:0", "127.0.0.1:0", "localhost:0", "127.0.0.1:65535")),
        (IPV6, ("[::]:0", "[::1]:0", "localhost:0", "[fd00::7]:0", "[::1]:65535")),
    ],
    ids=["both", "without IPv6", "IPv6 alone"],
)
def test_h56_every_printed_address_is_one_for_clients(setup: str, listen: tuple[str, ...]) -> None:
    """In a network that has both families, and where one of them is off. IPv6 alone: no IPv4 address even on `lo`."""
    with networked(setup, *listen) as (pid, targets):
        assert len(targets) == len(listen)
        assert not [target for target in targets if target.endswith(":0")]
        assert called(pid, targets) == targets


@pytest.mark.slow
def test_h56_a_port_in_use_is_refused_in_one_line(site: Site) -> None:
    """By whatever else has it, and in whatever form it is named."""
    buffer = site.start("buffer").members["buffer"]
    port = buffer.target.rpartition(":")[2]
    for address in (f"0.0.0.0:{port}", f"[::]:{port}"):
        code, said = refused("--listen", address, "--insecure")
        assert (code, said.rpartition(": ")[2]) == (1, "address in use")
    assert free_port(site.host) != int(port)
