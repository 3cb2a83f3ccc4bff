"""Nested dicts as flat names and back: pure.

Invariants: what was flattened comes back the same, empty dicts and odd keys included; "/" parts the keys of a path, and
is written "~1" inside one, "~" being "~0"; a key that the format keeps for itself is written "~m". Names of files that
others wrote are not parted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from turnout.tensors._header import BadTensors

TREE: Final = "turnout.tree"
"""Metadata key: "dict", "tensor" for one tensor alone; then names are paths."""

EMPTY: Final = "turnout.empty"
"""Metadata key: paths of empty dicts, as a JSON list."""

MAX_DEPTH: Final = 64
_ALONE: Final = "tensor"
_METADATA: Final = "__metadata__"
_KEPT: Final = "~m"


def flatten(tree: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors by name, and the metadata that tells the rest. Raises TypeError, ValueError."""
    if not isinstance(tree, Mapping):
        return {_ALONE: tree}, {TREE: "tensor"}
    flat: dict[str, Any] = {}
    empty: list[str] = []

    def walk(path: tuple[str, ...], node: Mapping[Any, Any]) -> None:
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"dicts are nested more than {MAX_DEPTH} deep")
        if path and not node:
            empty.append("/".join(path))
        for key, value in node.items():
            if not isinstance(key, str):
                raise TypeError(f"keys are texts, not {type(key).__name__}")
            below = (*path, key.replace("~", "~0").replace("/", "~1"))
            if isinstance(value, Mapping):
                walk(below, value)
            else:
                name = "/".join(below)
                flat[_KEPT if name == _METADATA else name] = value

    walk((), tree)
    metadata = {TREE: "dict"}
    if empty:
        metadata[EMPTY] = json.dumps(empty)
    return flat, metadata


def unflatten(flat: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    """Return what was flattened; tensors that others wrote as a dict by name. Raises BadTensors."""
    kind = metadata.get(TREE)
    if kind is None:
        return dict(flat)
    if kind == "tensor" and flat.keys() == {_ALONE}:
        return flat[_ALONE]
    if kind != "dict":
        raise BadTensors(f"the tree is {kind!r}")
    tree: dict[str, Any] = {}
    for path in _empty(metadata):
        _place(tree, path, {})
    for name, tensor in flat.items():
        _place(tree, _METADATA if name == _KEPT else name, tensor)
    return tree


def _empty(metadata: Mapping[str, str]) -> Iterable[str]:
    try:
        paths = json.loads(metadata.get(EMPTY, "[]"))
    except (ValueError, RecursionError) as error:
        raise BadTensors("the list of empty dicts is no JSON") from error
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise BadTensors("the list of empty dicts is no list of names")
    return paths


def _place(tree: dict[str, Any], path: str, value: Any) -> None:
    keys = [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")]
    if len(keys) > MAX_DEPTH:
        raise BadTensors(f"names are nested more than {MAX_DEPTH} deep")
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise BadTensors(f"{path!r} lies below a tensor")
    if keys[-1] in node:
        raise BadTensors(f"{path!r} is a tensor and a dict, or comes twice")
    node[keys[-1]] = value
