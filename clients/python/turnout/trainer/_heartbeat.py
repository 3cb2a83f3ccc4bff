"""Tells the scheduler that the trainer lives, from a thread of its own.

Invariants: training code may hold its thread, and its event loop, for as long as it likes; a failed heartbeat is tried
again, and only a newer epoch ends them, which the trainer learns at its next hook.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from turnout.client import ClientOptions, SchedulerClient, StaleEpoch, TurnoutError, seconds
from turnout.scheduler.v1 import scheduler_pb2

_log = logging.getLogger("turnout")

_SHARE: Final = 1 / 3
"""Two heartbeats in a row may be lost before the lease is."""

_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 20.0
_AFTER_FAILURE_S: Final = 2.0


class Heartbeat:
    """A daemon thread that sends heartbeats until it is stopped or fenced off."""

    def __init__(self, target: str, options: ClientOptions, *, run_id: str, epoch: int) -> None:
        self._client = SchedulerClient(target, options)
        self._request = scheduler_pb2.HeartbeatRequest(run_id=run_id, epoch=epoch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"turnout-heartbeat-{run_id}", daemon=True)
        self.fenced: StaleEpoch | None = None
        """Set once a newer trainer took over."""

    def start(self) -> None:
        """Send the first one at once, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its connection."""
        self._stop.set()
        self._client.close()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                lease = seconds(self._client.calls.Heartbeat(self._request).lease)
                pause = min(max(lease * _SHARE, _SHORTEST_S), _LONGEST_S)
            except StaleEpoch as error:
                self.fenced = error
                return
            except TurnoutError as error:
                if not self._stop.is_set():
                    _log.warning("heartbeat failed: %s", error)
                pause = _AFTER_FAILURE_S
            except (RuntimeError, ValueError):
                # The channel was closed under the call by stop().
                if not self._stop.is_set():
                    raise
