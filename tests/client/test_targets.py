"""What a target says about the way to it."""

from __future__ import annotations

import pytest

from turnout.channels import host_of, is_local, proxy_hint, proxy_variable

LOCAL = [
    "127.0.0.1:50051",
    "127.8.9.10:1",
    "localhost:50051",
    "LOCALHOST:1",
    "localhost.:1",
    "[::1]:50051",
    "unix:/run/turnout.sock",
    "unix:///run/turnout.sock",
    "unix-abstract:turnout",
    "dns:localhost:50051",
    "dns:///127.0.0.1:50051",
    "dns://8.8.8.8/localhost:1",
    "ipv4:127.0.0.1:50051",
    "ipv6:[::1]:50051",
    "ipv6:%5B::1%5D:50051",
    "::1",
]
REMOTE = [
    "10.0.0.5:50051",
    "trainer-0:50051",
    "localhost.example.org:1",
    "dns:///buffer.example.org:50051",
    "[2001:db8::1]:50051",
    "ipv4:192.168.1.2:50051",
]


@pytest.mark.parametrize("target", LOCAL)
def test_loopback_and_sockets_are_local(target: str) -> None:
    """A missed form is a call to this machine that goes to the company's proxy."""
    assert is_local(target)
    assert proxy_variable(target, {"http_proxy": "http://proxy:9"}) is None


@pytest.mark.parametrize("target", REMOTE)
def test_other_hosts_are_not(target: str) -> None:
    """Switching the proxy off for a remote host cuts off who needs it."""
    assert not is_local(target)
    assert proxy_variable(target, {"http_proxy": "http://proxy:9"}) == "http_proxy"


def test_the_variable_is_named_in_the_order_grpc_reads_them() -> None:
    """Naming a variable that has no effect sends a user on the wrong track."""
    environ = {"http_proxy": "a", "https_proxy": "b", "grpc_proxy": "c"}
    assert proxy_variable("host:1", environ) == "grpc_proxy"
    del environ["grpc_proxy"]
    assert proxy_variable("host:1", environ) == "https_proxy"
    assert proxy_variable("host:1", {"HTTP_PROXY": "a", "http_proxy": ""}) is None
    assert "https_proxy" in proxy_hint("host:1", environ)
    assert "host:1" in proxy_hint("host:1", environ)
    assert proxy_hint("host:1", {}) == ""


def test_no_proxy_exempts_by_suffix() -> None:
    """The hint must vanish once the user did what it says."""
    environ = {"http_proxy": "a", "no_proxy": "other, .example.org"}
    assert proxy_variable("buffer.example.org:1", environ) is None
    assert proxy_variable("buffer.example.com:1", environ) == "http_proxy"
    assert proxy_variable("buffer.example.org:1", environ | {"no_grpc_proxy": "nothing"}) == "http_proxy"


def test_hosts_are_found_in_all_forms() -> None:
    """A port or bracket left in the host makes every comparison fail."""
    assert host_of("[2001:db8::1]:5") == "2001:db8::1"
    assert host_of("2001:db8::1") == "2001:db8::1"
    assert host_of("dns://8.8.8.8/name:1") == "name"
    assert host_of("unix:/x") is None
