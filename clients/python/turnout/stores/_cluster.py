"""Being in a Ray cluster.

Invariant: a process joins a cluster that is there and never starts one: what it kept in a cluster of its own nobody
else could read.
"""

from __future__ import annotations

import threading
from typing import Any

from turnout.stores._protocol import unavailable

_lock = threading.Lock()


def join_cluster(ray: Any, store: str, address: str) -> None:
    """Join the cluster at `address` unless this process is in one. Raises Unavailable / STORE_UNAVAILABLE."""
    with _lock:
        if ray.is_initialized():
            return
        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            message = f"no Ray cluster at {address!r}; start one, or set RAY_ADDRESS: {error}"
            raise unavailable(store, message) from error
