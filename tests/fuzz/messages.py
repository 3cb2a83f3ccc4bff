"""Requests that nobody should send: random ones that are well formed, and bytes that are not.

Invariant: everything is drawn from the given source of randomness, so that a seed brings a finding back.
"""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

RUN: Final = "mine"
OTHER_RUN: Final = "theirs"
_DEPTH: Final = 4

_TEXTS: Final = (
    *("", " ", RUN, RUN.upper(), OTHER_RUN, "train", "val", "g0", "g1", "r0", "worker", "reference", "agent", "*"),
    *("../../etc/passwd", "/dev/zero", "a\0b", "\x1b[2J", "\u202e", "\ufffd" * 100, "é" * 256, "x" * 600, "y" * 70_000),
    *("127.0.0.1:1", "unix:/nonexistent", "dns:///", "file:///etc/passwd", "{}", "[" * 2000, '{"a":' * 500, "1e999"),
    *("__class__", "!!python/object/apply:os.system ['true']", "'; DROP TABLE runs; --", "%s", "-1"),
)
_INTS: Final = (0, 1, 2, 3, 7, -1, 100, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS: Final = (0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))

_INT_TYPES: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}


def random_message(rng: random.Random, kind: type[Message], run: str) -> Message:
    """Return a well-formed request about `run`, with values that no client of ours would send."""
    message = kind()
    _fill(rng, message, 0)
    fields = message.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        message.run_id = run  # type: ignore[attr-defined]
    elif "header" in fields and rng.random() < 0.8:
        header: Any = message.header  # type: ignore[attr-defined]
        header.run_id = run
        if "partition" in header.DESCRIPTOR.fields_by_name:
            header.partition = "train"
    return message


def random_bytes(rng: random.Random, good: bytes) -> bytes:
    """Return bytes that are mostly no message: noise, or a message that was damaged."""
    data = bytearray(good)
    match rng.randrange(7):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 5000)))
        case 1 if data:
            del data[rng.randrange(len(data)) :]
        case 2 if data:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 3:
            # A field that claims to be far longer than the message.
            data += bytes([rng.choice((0x0A, 0x12, 0x1A, 0xFA)), 0xFF, 0xFF, 0xFF, 0xFF, 0x07])
        case 4:
            # Groups inside of groups, and an end that nothing began.
            data += b"\x0b" * rng.randint(1, 20_000) + b"\x0c" * rng.randint(0, 3)
        case 5:
            # Messages inside of messages, deeper than parsers go.
            inner = b""
            for _ in range(300):
                inner = b"\x12" + _varint(len(inner)) + inner
            data += inner
        case _:
            # Text that is no UTF-8, varints that never end.
            data += rng.choice((b"\x0a\x04\xff\xfe\xfd\xfc", b"\x08" + b"\xff" * 11, b"\x00", b"\x07", b"\x0a\x01"))
    return bytes(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fill(rng: random.Random, message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field.is_repeated:
            _repeat(rng, message, field, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < _DEPTH:
                inner = getattr(message, field.name)
                inner.SetInParent()
                _fill(rng, inner, depth + 1)
        else:
            setattr(message, field.name, _value(rng, field))


def _repeat(rng: random.Random, message: Message, field: Any, depth: int) -> None:
    place = getattr(message, field.name)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                _fill(rng, place[_value(rng, key)], depth + 1)
            else:
                place[_value(rng, key)] = _value(rng, value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < _DEPTH:
                _fill(rng, place.add(), depth + 1)
        else:
            place.append(_value(rng, field))


def _value(rng: random.Random, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 16, 3000)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM and rng.random() < 0.7:
        return rng.choice(field.enum_type.values).number
    if field.type in _INT_TYPES:
        low, high = _INT_TYPES[field.type]
        return max(low, min(high, rng.choice(_INTS)))
    return rng.choice(_FLOATS)
