"""Where a service may listen."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from services.runtime import addresses
from services.runtime.addresses import Address, AddressError, check_free, parse_address


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051), True),
        ("127.8.0.1:1", Address("127.8.0.1", 1), True),
        ("localhost:0", Address("localhost", 0), True),
        ("[::1]:65535", Address("::1", 65535), True),
        ("0.0.0.0:80", Address("0.0.0.0", 80), False),
        ("[::]:80", Address("::", 80), False),
        ("node-3.cluster:80", Address("node-3.cluster", 80), False),
        ("unix:/run/turnout.sock", Address(path="/run/turnout.sock"), True),
        ("unix:///run/turnout.sock", Address(path="/run/turnout.sock"), True),
        ("unix:turnout.sock", Address(path="turnout.sock"), True),
    ],
)
def test_h56_address_forms(text: str, address: Address, local: bool) -> None:
    """Every form a user may write means one place, and whether others can reach it is known."""
    assert parse_address(text) == address
    assert parse_address(text).is_local is local
    assert parse_address(str(address)) == address, "the printed form cannot be read back"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("::1", "in brackets"),
        ("::1:50051", "in brackets"),
        ("127.0.0.1", "no port"),
        ("127.0.0.1:", "no valid port"),
        ("127.0.0.1:-1", "no valid port"),
        ("127.0.0.1:65536", "no valid port"),
        ("127.0.0.1:99999999999", "no valid port"),
        ("127.0.0.1:http", "no valid port"),
        ("127.0.0.1:²", "no valid port"),
        (":50051", "no valid host"),
        ("*:50051", "no valid host"),
        ("", "no port"),
        ("[::1]", "no port|in brackets|no IPv6"),
        ("[127.0.0.1]:1", "no IPv6 address"),
        ("[::1]:65536", "no valid port"),
        ("unix:", "no path"),
        ("unix:/" + "x" * 120, "too long"),
    ],
)
def test_h56_wrong_addresses_are_refused_in_one_line(text: str, why: str) -> None:
    """gRPC takes some of these for host names and fails seconds later, with a stack of internals."""
    with pytest.raises(AddressError, match=why) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_h47_a_port_in_use_is_seen() -> None:
    """The reason must be "address in use", which gRPC does not say."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(AddressError, match="address in use"):
            check_free(Address("127.0.0.1", port))
    check_free(Address("127.0.0.1", port))
    check_free(Address("127.0.0.1", 0))


def test_an_address_of_another_machine_is_refused() -> None:
    """192.0.2.0/24 is reserved for documentation: no machine has it."""
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1:0"):
        check_free(Address("192.0.2.1", 0))


def test_an_unknown_host_is_refused() -> None:
    """A name that does not resolve is a typing error, not a crash."""
    with pytest.raises(AddressError, match="unknown host"):
        check_free(Address("no-such-host.invalid", 1))


@pytest.fixture
def socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Relative, since the paths of temporary directories can be longer than a socket's may be.
    monkeypatch.chdir(tmp_path)
    return "turnout.sock"


def test_h47_a_live_unix_socket_is_left_alone(socket_path: str) -> None:
    """gRPC itself deletes the file and cuts the first server off from its clients."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_path)
        server.listen()
        with pytest.raises(AddressError, match="address in use"):
            check_free(Address(path=socket_path))
        assert os.path.exists(socket_path)


def test_h47_a_stale_unix_socket_is_taken_over(socket_path: str) -> None:
    """A server that was killed leaves its file behind, and must be able to start again."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_path)
    check_free(Address(path=socket_path))
    assert not os.path.exists(socket_path)


def test_a_file_that_is_no_socket_is_never_deleted(socket_path: str) -> None:
    """A mistyped path must not cost a user a file."""
    Path(socket_path).write_text("precious")
    with pytest.raises(AddressError, match="no socket"):
        check_free(Address(path=socket_path))
    assert Path(socket_path).read_text() == "precious"


def test_a_socket_in_a_missing_directory_is_refused() -> None:
    """gRPC would only say that binding failed."""
    with pytest.raises(AddressError, match="no directory"):
        check_free(Address(path="/no/such/directory/t.sock"))


def test_h56_where_ipv6_is_off_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC listens for IPv4 on [::] there, and its clients cannot so much as make a socket for it."""
    assert parse_address("[::]:7").for_clients() == parse_address("[::]:7" if addresses._ipv6_is_on() else "0.0.0.0:7")
    monkeypatch.setattr(addresses, "_ipv6_is_on", lambda: False)
    assert parse_address("[::]:7").for_clients() == parse_address("0.0.0.0:7")
    for other in ("[::1]:7", "127.0.0.1:7", "unix:/s"):
        assert parse_address(other).for_clients() == parse_address(other)
