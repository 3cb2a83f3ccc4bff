"""A worker process that finishes a group with payloads in a store of a Ray cluster, says so, and waits for its end.

python -m tests.client.stores.producer STORE BUFFER_TARGET GROUP_ID...
"""

from __future__ import annotations

import sys
import time

import numpy as np

from tests.client.stores.places import finish
from turnout.client import BufferClient
from turnout.stores import open_store
from turnout.tensors import pack


def tree(group_id: str) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """The tensors of a group: 4 MB."""
    return {"tokens": np.full(1_000_000, len(group_id), np.float32)}


if __name__ == "__main__":
    name, target, *group_ids = sys.argv[1:]
    store = open_store(name)
    with BufferClient(target) as client:
        for group_id in group_ids:
            finish(client, group_id, [store.put(pack(tree(group_id))), store.put(group_id.encode())])
    print("finished", flush=True)
    time.sleep(600)
