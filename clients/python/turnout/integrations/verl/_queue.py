"""TransferQueue as verl 0.9.1 uses it: prompts under `{uid}`, outputs under `{uid}_{session}_{index}`.

Invariants: nothing but tags and, where groups are filtered, rewards is read here; payloads stay where they are. A uid
may contain `_`: keys are taken apart from their end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from turnout.buffer.v1 import buffer_pb2

TRAIN: Final = "train"
VALIDATION: Final = "val"
FINISHED: Final = "finished"
FAILED: Final = "failure"
TERMINAL: Final = (FINISHED, FAILED)

CANONICAL: Final = "reward"
"""The metric that verl reads from `rm_scores`; every other one is in `reward_extra_info`."""


class Queue(Protocol):
    """The calls of the module `transfer_queue` that are made here."""

    def kv_list(self, partition_id: str | None = None) -> Mapping[str, Mapping[str, Any]] | None: ...
    def kv_clear(self, keys: list[str], partition_id: str) -> None: ...
    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output belongs."""

    uid: str
    session: int
    index: int


def place_of(key: str) -> Place:
    """The place that a key names."""
    uid, session, index = key.rsplit("_", 2)
    return Place(uid, int(session), int(index))


@dataclass(slots=True)
class Snapshot:
    """One partition at one moment: tags by prompt and by output, as they arrived, and the outputs of each prompt."""

    prompts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    arrived: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)

    def keys(self, uids: Collection[str]) -> list[str]:
        """The keys of all outputs of these prompts."""
        return [key for uid in uids for key in self.outputs.get(uid, ())]


def read(queue: Queue, partition: str) -> Snapshot:
    """Read the tags of a partition."""
    snapshot = Snapshot()
    for key, tag in ((queue.kv_list(partition) or {}).get(partition) or {}).items():
        if tag.get("is_prompt", False):
            snapshot.prompts[key] = tag
        else:
            snapshot.arrived[key] = tag
            snapshot.outputs.setdefault(key.rsplit("_", 2)[0], {})[key] = tag
    return snapshot


def rewards(queue: Queue, partition: str, keys: list[str], metric: str) -> dict[str, float]:
    """The rewards that verl filters by, of those outputs that have one."""
    if not keys:
        return {}
    column = "rm_scores" if metric == CANONICAL else "extra_fields"
    values = list(queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=[column])[column])
    if metric == CANONICAL:
        return {key: float(value.sum().item()) for key, value in zip(keys, values, strict=True)}
    extra = {key: getattr(value, "data", value) for key, value in zip(keys, values, strict=True)}
    info = {key: value.get("reward_extra_info", {}) for key, value in extra.items() if isinstance(value, dict)}
    return {key: float(value[metric]) for key, value in info.items() if metric in value}


def output(tag: Mapping[str, Any], reward: Mapping[str, float]) -> buffer_pb2.Output:
    """An output as the index has it. verl tells the first and the last weight version of it, and not how they share."""
    first, last = tag.get("min_global_steps"), tag.get("max_global_steps")
    return buffer_pb2.Output(
        prompt_tokens=int(tag["prompt_len"]),
        segments=[
            buffer_pb2.Segment(
                tokens=int(tag["response_len"]), weight_version=None if first is None or first != last else int(first)
            )
        ],
        rewards=reward,
    )


def results(
    uid: str,
    tags: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, float],
    metric: str | None,
    token: buffer_pb2.ClaimToken,
) -> Iterable[buffer_pb2.TrajectoryResult]:
    """What a group's sessions produced, from the tags of its outputs. Outputs without a token are left out."""
    sessions: dict[int, list[tuple[int, str]]] = {}
    for key, tag in tags.items():
        place = place_of(key)
        if tag["response_len"] > 0:
            sessions.setdefault(place.session, []).append((place.index, key))
    for session in sorted(sessions):
        outputs = [
            output(tags[key], {metric: values[key]} if metric is not None and key in values else {})
            for _, key in sorted(sessions[session])
        ]
        yield buffer_pb2.TrajectoryResult(token=token, group_id=uid, index=session, outputs=outputs)
