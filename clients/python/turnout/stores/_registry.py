"""Stores by what is written down for them: a name, a URI, or the store itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client._payloads import Bytes
from turnout.stores import _ray, _transferqueue, _uri
from turnout.stores._protocol import PayloadStore, unusable

_HOW: Final = {
    _ray.NAME: "pass stores=['ray'] and pip install 'turnout[ray]'",
    _transferqueue.NAME: "pass stores=['transferqueue'] and pip install 'turnout[transferqueue]'",
    _uri.NAME: "pass the URI they are below, such as stores=['s3://bucket/payloads'], and pip install 'turnout[uri]'",
}


def open_store(spec: str | PayloadStore) -> PayloadStore:
    """Return the store of a specification: "ray", "transferqueue", a URI to keep files below, or a store itself.

    Raises FailedPrecondition / EXTRA_MISSING naming what to install, UNKNOWN_STORE, UNKNOWN_SCHEME.
    """
    if not isinstance(spec, str):
        return spec
    if "://" in spec:
        return _uri.UriStore(spec)
    if spec == _ray.NAME:
        return _ray.RayStore()
    if spec == _transferqueue.NAME:
        return _transferqueue.TransferQueueStore()
    message = f"there is no payload store {spec!r}: it is 'ray', 'transferqueue', a URI such as file:///mnt/payloads, "
    raise unusable(spec, "UNKNOWN_STORE", message + "or a PayloadStore of your own")


class Stores:
    """The external stores a process reads from, by the name in references."""

    def __init__(self, specs: Sequence[str | PayloadStore] = ()) -> None:
        """Raises what `open_store` raises; ValueError for two stores of one name."""
        self._stores: dict[str, PayloadStore] = {}
        for spec in specs:
            store = open_store(spec)
            if store.name in self._stores:
                raise ValueError(f"two payload stores are called {store.name!r}")
            self._stores[store.name] = store

    def __iter__(self) -> Iterator[PayloadStore]:
        return iter(self._stores.values())

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Return the bytes of references into any of the stores, in order.

        Raises FailedPrecondition / UNKNOWN_STORE naming what to install, and what the stores raise.
        """
        found: list[Bytes] = [b""] * len(refs)
        for name in dict.fromkeys(ref.store for ref in refs):
            positions = [position for position, ref in enumerate(refs) if ref.store == name]
            got = self.require(name).get([refs[position] for position in positions])
            for position, data in zip(positions, got, strict=True):
                found[position] = data
        return found

    def require(self, name: str) -> PayloadStore:
        """Return the store of a name. Raises FailedPrecondition / UNKNOWN_STORE."""
        store = self._stores.get(name)
        if store is None:
            known = ", ".join(sorted(self._stores)) or "none"
            how = _HOW.get(name, "pass a PayloadStore of that name in stores=[...]")
            raise unusable(
                name, "UNKNOWN_STORE", f"payloads are in store {name!r}, and this process has {known}: {how}"
            )
        return store

    def close(self) -> None:
        """Close them all."""
        for store in self._stores.values():
            store.close()
