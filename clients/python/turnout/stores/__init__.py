"""Payload stores outside the buffer: Ray's object store, TransferQueue, files at a URI.

    worker = RolloutWorker(WorkerSetup("r1", buffer="...", engine="...", store="ray"))
    setup = TrainerSetup(run_id="r1", ..., stores=["ray"])

Clients write and read the bytes there; the buffer keeps references with size and CRC32C, and a `StoreOwner` deletes
what it lets go. A store of your own is any object with the shape of `PayloadStore`.
"""

from turnout.stores._embedded import EmbeddedStore
from turnout.stores._owner import StoreOwner
from turnout.stores._protocol import PayloadStore
from turnout.stores._ray import RayStore
from turnout.stores._registry import Stores, open_store
from turnout.stores._transferqueue import TransferQueueStore
from turnout.stores._uri import UriStore

__all__ = [
    "EmbeddedStore",
    "PayloadStore",
    "RayStore",
    "StoreOwner",
    "Stores",
    "TransferQueueStore",
    "UriStore",
    "open_store",
]
