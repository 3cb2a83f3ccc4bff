"""What a trainer tells Turnout about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnout.buffer.v1 import buffer_pb2
from turnout.client import ClientOptions, PaysRefills, ProgressFn, RefillFn
from turnout.client._ids import check_text
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.stores import PayloadStore
from turnout.trainer._weights import UpdateWeights


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """Everything the hooks need to know."""

    run_id: str
    """The run."""
    config: scheduler_pb2.RunConfig
    """How it trains and switches."""
    scheduler: str
    """gRPC target of the switch scheduler."""
    buffer: str
    """gRPC target of the run's replay buffer, as trainer and scheduler reach it."""
    engine: str
    """gRPC target of the run's engine controller, as trainer and scheduler reach it."""
    buffer_config: buffer_pb2.RunConfig | None = None
    """If set, the run is created in the buffer with it; a run that exists with the same configuration is fine."""
    refill_fn: RefillFn | None = None
    """Gives fresh prompts from inside a wait, on the waiting thread, when groups were evicted."""
    refills: PaysRefills | None = None
    """In place of refill_fn: pays refill claims by itself."""
    update_weights: UpdateWeights | None = None
    """Moves weights, unless the hook is given another one."""
    on_progress: ProgressFn | None = None
    """Called with every PROGRESS event of a wait."""
    resume: scheduler_pb2.Resume | None = None
    """Where a resumed trainer stands; see `resume_from`."""
    take_over: bool = False
    """Whether to take over from a predecessor whose lease still lives."""
    staggered: bool = False
    """Whether standalone replicas are updated in two waves, so that some decode all the time."""
    in_flight: engine_pb2.InFlight.ValueType = engine_pb2.IN_FLIGHT_ABORT
    """What happens to running requests of standalone replicas during an update."""
    stores: Sequence[str | PayloadStore] = ()
    """External payload stores that batches are read from, and that the hooks delete from what the buffer lets go:
    "ray", "transferqueue", a URI such as file:///mnt/payloads, or a store of your own."""
    options: ClientOptions = field(default_factory=ClientOptions)
    """How the clients behave."""

    def __post_init__(self) -> None:
        check_text("run_id", self.run_id)

    @property
    def partition(self) -> str:
        """Buffer partition trained from."""
        return self.config.partition or "train"
