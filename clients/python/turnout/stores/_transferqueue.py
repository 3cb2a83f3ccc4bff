"""Payloads under keys of TransferQueue, which verl moves its own batches through.

Invariants: a payload is one row of one partition that holds nothing else, with one uint8 column; the store attaches to
the TransferQueue that the trainer started and never starts one. TransferQueue's own messages use pickle between its
processes, which is its affair: it belongs in a trusted network.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any, Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client._payloads import Bytes, parts_of, size_of
from turnout.stores._cluster import join_cluster
from turnout.stores._protocol import missing, reference, refused, unavailable, unusable, verified

NAME: Final = "transferqueue"
_COLUMN: Final = "payload"
_KEY: Final = re.compile(r"[0-9a-f]{32}")


class TransferQueueStore:
    """TransferQueue of the Ray cluster; `transfer_queue.init()` was called by the trainer before."""

    name = NAME

    def __init__(self, partition: str = "turnout-payloads", *, address: str = "auto") -> None:
        """Attaches at its first use, and joins the cluster at `address` before, unless this process is in one.

        Raises FailedPrecondition / EXTRA_MISSING.
        """
        try:
            import ray
            import torch
            import transfer_queue
        except ImportError as error:
            message = "payloads in TransferQueue need it: pip install 'turnout[transferqueue]'"
            raise unusable(NAME, "EXTRA_MISSING", message) from error
        self._ray: Any = ray
        self._address = address
        self._queue: Any = transfer_queue
        self._torch: Any = torch
        self._partition = partition

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Put one row."""
        key = uuid.uuid4().hex
        # A tensor over memory that cannot be written would be undefined; the copy is the one that makes the row.
        row = self._torch.empty(size_of(data), dtype=self._torch.uint8)
        into, at = row.numpy(), 0
        for part in parts_of(data):
            view = memoryview(part).cast("B")
            into[at : at + len(view)] = view
            at += len(view)
        self._attached(self._queue.kv_put, key=key, partition_id=self._partition, fields={_COLUMN: row})
        return reference(NAME, key, data)

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Read rows, together."""
        for ref in refs:
            _check(ref.id)
        if not refs:
            return []
        rows = self._rows([ref.id for ref in refs])
        if len(rows) != len(refs):
            # Rows that are not there are left out; which, only asking for each tells.
            rows = []
            for ref in refs:
                found = self._rows([ref.id])
                if not found:
                    raise missing(NAME, ref.id)
                rows += found
        return [verified(ref, memoryview(row.numpy()).toreadonly()) for ref, row in zip(refs, rows, strict=True)]

    def _rows(self, keys: list[str]) -> list[Any]:
        try:
            answer = self._attached(
                self._queue.kv_batch_get, keys=keys, partition_id=self._partition, select_fields=[_COLUMN]
            )
        except (ValueError, self._queue.StorageKeyNotFoundError):
            return []
        rows = list(answer[_COLUMN].unbind())
        torch = self._torch
        for key, row in zip(keys, rows, strict=False):
            if not isinstance(row, torch.Tensor) or row.dtype != torch.uint8 or row.ndim != 1:
                raise refused(NAME, key, f"the row of {key!r} is no payload")
        return rows

    def delete(self, ids: Sequence[str]) -> None:
        """Clear rows."""
        for payload_id in ids:
            _check(payload_id)
        if ids:
            self._attached(self._queue.kv_clear, keys=list(ids), partition_id=self._partition)

    def close(self) -> None:
        """The connection is the process's own, and stays."""

    def _attached(self, call: Any, **arguments: Any) -> Any:
        join_cluster(self._ray, NAME, self._address)
        try:
            return call(**arguments)
        except AssertionError as error:
            message = "no TransferQueue to attach to: the trainer calls transfer_queue.init() first"
            raise unavailable(NAME, message) from error
        except RuntimeError as error:
            raise unavailable(NAME, f"TransferQueue: {error}") from error


def _check(payload_id: str) -> None:
    if not _KEY.fullmatch(payload_id):
        raise refused(NAME, payload_id, f"{payload_id!r} is not a key of this store")
