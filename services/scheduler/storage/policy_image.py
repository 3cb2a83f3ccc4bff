"""What a policy knows, as bytes: plain JSON, which a person can read and which runs nothing when it is read.

Invariants: only values are stored (numbers, strings, containers, arrays, and objects of this service's own classes by
the names of their fields), so reading makes no call but `object.__new__` of such a class; what is read back behaves as
what was written; an image of classes whose code has changed since is refused, never half read.

Form: {"modules": CRC-32 of the source of each module that classes come from, "value": the value}. Of values, null,
true, false, numbers and strings are written as they are; anything else is a list that begins with its kind. An object
that occurs twice is written once; ["=", n] is the n-th list, dict, set, deque, array or object that was begun.
"""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import json
import zlib
from collections import deque
from enum import Enum
from typing import Any, Final

import numpy as np

_OWN: Final = "services.scheduler."
"""Where classes may come from."""


class UnreadableImageError(Exception):
    """The image was written by another version of the classes in it."""


def write(value: object) -> bytes:
    """The image of `value`. Raises TypeError for what an image cannot hold."""
    writer = _Writer()
    form = writer.put(value)
    modules = {name: _version(name) for name in sorted(writer.modules)}
    return json.dumps({"modules": modules, "value": form}, separators=(",", ":")).encode()


def read(image: bytes) -> Any:
    """What was written. Raises UnreadableImageError."""
    try:
        form = json.loads(image)
        for module, version in form["modules"].items():
            if _version(module) != version:
                raise ValueError(f"{module} is another version now")
        return _Reader().get(form["value"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error


_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots(owner: type) -> tuple[str, ...]:
    """The slots of a class and its bases."""
    if owner not in _SLOTS:
        _SLOTS[owner] = _find_slots(owner)
    return _SLOTS[owner]


def _find_slots(owner: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in reversed(owner.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _state(value: object) -> dict[str, object]:
    state = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return state | dict(getattr(value, "__dict__", {}))


def _name(owner: type) -> str:
    if not owner.__module__.startswith(_OWN) or "<" in owner.__qualname__:
        raise TypeError(f"an image holds no {owner.__module__}.{owner.__qualname__}")
    return f"{owner.__module__}:{owner.__qualname__}"


@functools.cache
def _version(module: str) -> int:
    if not module.startswith(_OWN):
        raise TypeError(f"an image holds nothing of {module}")
    return zlib.crc32(inspect.getsource(importlib.import_module(module)).encode())


class _Writer:
    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._begun: dict[int, int] = {}
        self._held: list[object] = []
        """Keeps what was begun alive, so that no id is used twice."""

    def put(self, value: object) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, tuple) and type(value) is tuple:
            return ["tuple", *map(self.put, value)]
        if isinstance(value, Enum):
            self.modules.add(type(value).__module__)
            return ["enum", _name(type(value)), value.name]
        if isinstance(value, np.generic):
            return ["scalar", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
        if id(value) in self._begun:
            return ["=", self._begun[id(value)]]
        self._begun[id(value)] = len(self._begun)
        self._held.append(value)
        return self._put_object(value)

    def _put_object(self, value: object) -> Any:
        kind = type(value)
        if kind is list:
            return ["list", *map(self.put, value)]  # type: ignore[call-overload]
        if kind in (set, frozenset):
            return [kind.__name__, *map(self.put, value)]  # type: ignore[call-overload]
        if isinstance(value, deque):
            return ["deque", value.maxlen, *map(self.put, value)]
        if kind is dict:
            return ["dict", *([self.put(key), self.put(item)] for key, item in value.items())]  # type: ignore[attr-defined]
        if isinstance(value, np.ndarray):
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return ["array", value.dtype.str, list(value.shape), data]
        self.modules.add(kind.__module__)
        return ["object", _name(kind), {name: self.put(item) for name, item in _state(value).items()}]


class _Reader:
    def __init__(self) -> None:
        self._begun: list[object] = []

    def get(self, form: Any) -> Any:
        if not isinstance(form, list):
            return form
        kind = form[0]
        if kind == "=":
            return self._begun[form[1]]
        return getattr(self, f"_{kind}")(*form[1:])

    def _begin(self, value: Any) -> Any:
        self._begun.append(value)
        return value

    def _tuple(self, *items: Any) -> tuple[Any, ...]:
        return tuple(map(self.get, items))

    def _list(self, *items: Any) -> Any:
        made = self._begin([])
        made.extend(map(self.get, items))
        return made

    def _set(self, *items: Any) -> Any:
        made = self._begin(set())
        made.update(map(self.get, items))
        return made

    def _frozenset(self, *items: Any) -> Any:
        place = len(self._begun)
        self._begin(None)
        self._begun[place] = frozenset(map(self.get, items))
        return self._begun[place]

    def _deque(self, maxlen: int | None, *items: Any) -> Any:
        made = self._begin(deque(maxlen=maxlen))
        made.extend(map(self.get, items))
        return made

    def _dict(self, *items: Any) -> Any:
        made = self._begin({})
        for key, value in items:
            made[self.get(key)] = self.get(value)
        return made

    def _array(self, dtype: str, shape: list[int], data: str) -> Any:
        return self._begin(np.frombuffer(base64.b64decode(data), dtype=_numbers(dtype)).reshape(shape).copy())

    def _scalar(self, dtype: str, data: str) -> Any:
        return np.frombuffer(base64.b64decode(data), dtype=_numbers(dtype))[0]

    def _enum(self, name: str, member: str) -> Any:
        owner = _class(name)
        if not issubclass(owner, Enum):
            raise TypeError(f"{name} is no enum")
        return owner[member]

    def _object(self, name: str, state: dict[str, Any]) -> Any:
        owner = _class(name)
        made = self._begin(object.__new__(owner))
        for field, value in state.items():
            object.__setattr__(made, field, self.get(value))
        return made


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    if not module.startswith(_OWN):
        raise TypeError(f"an image holds no {name}")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or _name(found) != name:
        raise TypeError(f"{name} is no class")
    return found


def _numbers(dtype: str) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if found.kind not in "biuf":
        raise TypeError(f"an image holds no arrays of {dtype}")
    return found
