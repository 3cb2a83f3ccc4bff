"""Payloads in Ray's object store.

Invariants: an object is owned by a detached actor on the node it was put from, so it survives the process that put it,
and other jobs of the cluster can read it; an id names that actor and a key in it. Objects are uint8 arrays, which Ray
shares between the processes of a node without a copy; nothing else is accepted from it.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client._payloads import Bytes, parts_of, size_of
from turnout.stores._cluster import join_cluster
from turnout.stores._protocol import full, missing, reference, refused, unavailable, unusable, verified
from turnout.stores._ray_owner import PayloadOwner

NAME: Final = "ray"
NAMESPACE: Final = "turnout"
"""Ray namespace of the owners, whatever the caller's own is."""

_ID: Final = re.compile(r"([0-9a-f]{56})/([0-9a-f]{32})")
"""Node and key."""

_CALL_S: Final = 120.0
"""For an owner to answer: it may have to start, and to copy a payload."""


class RayStore:
    """Ray's object store. Unless Ray is initialised, it joins the cluster of RAY_ADDRESS, or this machine's."""

    name = NAME

    def __init__(self, address: str = "auto", *, namespace: str = NAMESPACE) -> None:
        """Connects at its first use. Raises FailedPrecondition / EXTRA_MISSING."""
        try:
            import numpy
            import ray
        except ImportError as error:
            message = "payloads in Ray's object store need Ray: pip install 'turnout[ray]'"
            raise unusable(NAME, "EXTRA_MISSING", message) from error
        self._ray: Any = ray
        self._numpy: Any = numpy
        self._address = address
        self._namespace = namespace
        self._lock = threading.Lock()
        self._owners: dict[str, Any] = {}

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Let the owner on this node keep the bytes."""
        join_cluster(self._ray, NAME, self._address)
        node: str = self._ray.get_runtime_context().get_node_id()
        key = uuid.uuid4().hex
        self._call(node, "put", key, self._array(data), create=True)
        return reference(NAME, f"{node}/{key}", data)

    def _array(self, data: Bytes | Sequence[Bytes]) -> Any:
        parts = parts_of(data)
        if len(parts) == 1:
            return self._numpy.frombuffer(parts[0], dtype="uint8")
        array = self._numpy.empty(size_of(data), dtype="uint8")
        at = 0
        for part in parts:
            view = memoryview(part).cast("B")
            array[at : at + len(view)] = view
            at += len(view)
        return array

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Return read-only views of shared memory, which stay good when the payload is deleted."""
        join_cluster(self._ray, NAME, self._address)
        by_node: defaultdict[str, list[int]] = defaultdict(list)
        keys: list[str] = []
        for position, ref in enumerate(refs):
            node, key = _split(ref.id)
            by_node[node].append(position)
            keys.append(key)
        objects: dict[int, Any] = {}
        for node, positions in by_node.items():
            found = self._call(node, "find", [keys[position] for position in positions])
            objects.update(zip(positions, found or [None] * len(positions), strict=True))
        for position, ref in enumerate(refs):
            if objects[position] is None:
                raise missing(NAME, ref.id)
        errors = self._ray.exceptions
        try:
            arrays = self._ray.get([objects[position] for position in range(len(refs))], timeout=_CALL_S)
        except (errors.ObjectLostError, errors.OwnerDiedError) as error:
            raise missing(NAME, ", ".join(ref.id for ref in refs)) from error
        except errors.GetTimeoutError as error:
            raise unavailable(NAME, f"Ray did not bring {len(refs)} payloads within {_CALL_S:g} s") from error
        return [verified(ref, self._bytes(ref, array)) for ref, array in zip(refs, arrays, strict=True)]

    def _bytes(self, ref: buffer_pb2.PayloadRef, array: Any) -> memoryview:
        if not isinstance(array, self._numpy.ndarray) or array.dtype != "uint8" or array.ndim != 1:
            raise refused(NAME, ref.id, f"the object of {ref.id!r} is no payload")
        return memoryview(array).toreadonly()

    def delete(self, ids: Sequence[str]) -> None:
        """Let objects go; the memory is free once nobody reads them any more."""
        join_cluster(self._ray, NAME, self._address)
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        for payload_id in ids:
            node, key = _split(payload_id)
            by_node[node].append(key)
        for node, keys in by_node.items():
            self._call(node, "delete", keys)

    def close(self) -> None:
        """The connection to Ray is the process's own, and stays."""
        with self._lock:
            self._owners.clear()

    def _call(self, node: str, method: str, *arguments: Any, create: bool = False) -> Any:
        """Ask the owner on a node; without `create`, None if there is none (any more)."""
        errors = self._ray.exceptions
        owner = self._owner(node, create)
        if owner is None:
            return None
        try:
            return self._ray.get(getattr(owner, method).remote(*arguments), timeout=_CALL_S)
        except errors.ObjectStoreFullError as error:
            raise full(NAME, "Ray's object store is full") from error
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.ObjectStoreFullError):
                raise full(NAME, "Ray's object store is full") from error
            raise
        except errors.ActorDiedError as error:
            with self._lock:
                self._owners.pop(node, None)
            if create:
                raise unavailable(NAME, "the owner of the payloads died; the next put starts another") from error
            return None
        except (errors.GetTimeoutError, errors.ActorUnavailableError) as error:
            raise unavailable(NAME, f"the owner of the payloads on node {node} does not answer") from error

    def _owner(self, node: str, create: bool) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            owner = self._owners.get(node)
            if owner is not None:
                return owner
            name = f"turnout-payloads-{node}"
            if create:
                options = {
                    "name": name,
                    "namespace": self._namespace,
                    "lifetime": "detached",
                    "get_if_exists": True,
                    "num_cpus": 0,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
                }
                owner = self._ray.remote(PayloadOwner).options(**options).remote()
            else:
                try:
                    owner = self._ray.get_actor(name, namespace=self._namespace)
                except ValueError:
                    return None
            self._owners[node] = owner
            return owner


def _split(payload_id: str) -> tuple[str, str]:
    match = _ID.fullmatch(payload_id)
    if match is None:
        raise refused(NAME, payload_id, f"{payload_id!r} is not of the form NODE/KEY")
    return match[1], match[2]
