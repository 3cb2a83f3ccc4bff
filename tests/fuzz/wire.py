"""Bytes below gRPC: what a connection can carry that no gRPC library would send."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_ANSWER_S: Final = 0.3
"""How long an answer is waited for; most of these get none."""


def hostile_connection(rng: random.Random, path: str, token: str, message: bytes) -> bytes:
    """Return everything that one connection sends."""
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.choice((1, 24, 1000, 100_000)))
        case 1:
            return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        case 2:
            return _PREFACE + b"".join(_random_frame(rng) for _ in range(rng.randint(1, 20)))
        case 3:
            # A frame that claims 16 MiB.
            return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + b"\xff\xff\xff" + rng.randbytes(6)
        case 4:
            return _call(path, token, b"", rng)[: rng.randint(1, 400)]
    # A message that claims to be compressed, or up to 4 GiB long.
    flag = rng.choice((0, 1, 2, 255))
    length = rng.choice((0, len(message) + 1, 2**31, 2**32 - 1, max(0, len(message) - 1)))
    return _call(path, token, bytes([flag]) + length.to_bytes(4, "big") + message[:10_000], rng)


async def send(target: str, data: bytes) -> None:
    """Open a connection, send, listen for a moment, and go without a word."""
    host, _, port = target.rpartition(":")
    # The server may close while we write.
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(_ANSWER_S):
                await reader.read(65_536)
        finally:
            writer.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _random_frame(rng: random.Random) -> bytes:
    stream = rng.choice((0, 1, 3, 2**31 - 1))
    return _frame(rng.choice((*range(11), 255)), rng.randrange(256), stream, rng.randbytes(rng.choice((0, 4, 8, 300))))


def _call(path: str, token: str, body: bytes, rng: random.Random) -> bytes:
    headers = [
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")),
        ("content-type", rng.choice(("application/grpc", "application/grpc+json", "text/html"))),
        ("grpc-encoding", rng.choice(("identity", "gzip", "snappy"))),
        ("grpc-timeout", rng.choice(("1S", "99999999H", "-1S", "x"))),
        ("authorization", f"Bearer {token}"),
    ]
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)
    opening = _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS, 1, block)
    return (
        opening
        + b"".join(_frame(_DATA, 0, 1, body[start : start + 16_000]) for start in range(0, len(body), 16_000))
        + _frame(_DATA, _END_STREAM, 1, b"")
    )


def _text(text: str) -> bytes:
    # HPACK without Huffman codes; 127 and more need further bytes.
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, out = len(data) - 127, bytearray([127])
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out) + data
