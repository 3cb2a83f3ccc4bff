"""TransferQueue's calls over a dict, for what runs thousands of times."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


class Score:
    """What verl reads of a row of `rm_scores`."""

    def __init__(self, value: float) -> None:
        self._value = value

    def sum(self) -> Score:
        return self

    def item(self) -> float:
        return self._value


class FakeQueue:
    """Tags are merged and lists are copies, as in TransferQueue 0.1.11; `fields` are what a key was put with."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        self.fields: dict[tuple[str, str], Mapping[str, Any]] = {}

    def put(self, key: str, partition_id: str, tag: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> None:
        self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tag)
        if fields is not None:
            self.fields[partition_id, key] = fields

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        names = self.tags if partition_id is None else [partition_id]
        return {name: copy.deepcopy(self.tags.get(name, {})) for name in names}

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            self.tags.get(partition_id, {}).pop(key, None)
            self.fields.pop((partition_id, key), None)

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> dict[str, Any]:
        return {name: [self.fields[partition_id, key][name] for key in keys] for name in select_fields}
