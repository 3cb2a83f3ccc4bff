"""StoreOwner: deletes in an external store what the buffer let go.

Invariants: a payload is acknowledged only after it was deleted, so whoever dies in between, it is deleted once more and
acknowledged then; a store or buffer that is away is tried again for as long as the owner runs.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, ClientOptions, LinkClosed, RunNotFound
from turnout.stores._protocol import PayloadStore

_log = logging.getLogger("turnout")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


class StoreOwner:
    """A daemon thread that follows the releases of one run in one store. Any number may run; one is enough."""

    def __init__(self, target: str, run_id: str, store: PayloadStore, options: ClientOptions | None = None) -> None:
        """`target` is the gRPC target of the run's buffer. `store` stays the caller's."""
        self._client = BufferClient(target, options)
        self._run_id = run_id
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"turnout-store-{store.name}", daemon=True)
        self.deleted = 0
        """Payloads deleted and acknowledged so far."""

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if it began, and close its connection.

        What was let go and not deleted is told to the next owner.
        """
        self._stop.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is gone and all of it is deleted; return whether that came within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                for refs in self._client.watch_releases(self._run_id, self._store.name):
                    self._delete(refs)
                    pause = _FIRST_PAUSE_S
                return
            except (RunNotFound, LinkClosed):
                return
            except Exception as error:
                if self._stop.is_set():
                    return
                _log.warning("store %s: payloads that may go are not deleted yet: %s", self._store.name, error)
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _delete(self, refs: list[buffer_pb2.PayloadRef]) -> None:
        ids = [ref.id for ref in refs]
        self._store.delete(ids)
        request = buffer_pb2.AckReleasesRequest(run_id=self._run_id, store=self._store.name, ids=ids)
        self.deleted += self._client.calls.AckReleases(request).acknowledged
