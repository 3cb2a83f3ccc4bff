"""What a worker is told, and what it tells."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from turnout.client import INLINE_BYTES, ClientOptions
from turnout.client._ids import check_text
from turnout.engine.v1 import engine_pb2
from turnout.stores import PayloadStore


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker needs to know."""

    run_id: str
    """The run."""
    buffer: str
    """gRPC target of the replay buffer."""
    engine: str | None = None
    """gRPC target of the engine controller; not needed with a generate function."""
    partition: str = "train"
    """Partition to work on."""
    worker_id: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """Who claims, for operators."""
    concurrency: int = 64
    """Trajectories at work at once."""
    max_tokens: int = 4096
    """Budget of output tokens per trajectory."""
    sampling: engine_pb2.Sampling = field(default_factory=engine_pb2.Sampling)
    """How tokens are drawn."""
    run_wait: float = 60.0
    """Wall seconds to wait for the run to appear in the buffer, at the start and after a restart of the buffer."""
    progress_interval: float = 2.0
    """Wall seconds between batches of progress reports, if jobs report any."""
    store: str | PayloadStore | None = None
    """Where payloads go that do not fit into a message: "ray", "transferqueue", a URI such as file:///mnt/payloads, or
    a store of your own; the buffer itself unless set. The trainer names it in `TrainerSetup.stores`."""
    inline_bytes: int = INLINE_BYTES
    """Largest payload that travels inside a message, at most 256 KiB."""
    options: ClientOptions = field(default_factory=ClientOptions)
    """How the clients behave."""

    def __post_init__(self) -> None:
        for name in ("run_id", "partition", "worker_id"):
            check_text(name, getattr(self, name))
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, it is {self.concurrency}")
        if not 0 <= self.inline_bytes <= INLINE_BYTES:
            raise ValueError(f"inline_bytes must be 0 to {INLINE_BYTES}, it is {self.inline_bytes}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, it is {self.max_tokens}")


@dataclass(slots=True)
class WorkerStats:
    """What a worker did so far, in trajectories."""

    finished: int = 0
    failed: int = 0
    handed_back: int = 0
    lost: int = 0
    """Claims that expired or whose group was evicted or settled by others."""
