"""What the switch scheduler can be told."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.runtime.config import Strings, settings_config
from services.runtime.journal import DURABILITY_HELP, Durability, durability_of
from services.runtime.peers import PeerSettings

DEFAULT_LISTEN = "127.0.0.1:50053"


class SchedulerSettings(PeerSettings):
    """Settings of the switch scheduler."""

    model_config = settings_config("scheduler")

    listen: Strings = Field(
        [DEFAULT_LISTEN],
        min_length=1,
        description="Where to listen: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 takes a free port and prints it.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory, on a local disk, for the runs, which then survive a restart with all that their "
        "policies learned; without one nothing does.",
    )
    durability: Durability | None = Field(
        None,
        description=f"With a data directory, {DURABILITY_HELP}. Default: os with a data directory, else none.",
    )
    peer_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds given to a buffer or engine controller for a call that moves nothing."
    )
    transition_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="Seconds given to an engine controller to lend or reclaim all replicas."
    )
    transition_attempts: int = Field(
        3, ge=1, le=100, description="How often a transition is tried before the call that needs it fails."
    )
    transition_backoff_s: float = Field(
        0.5, ge=0, le=3600, description="Pause before a transition is tried again, doubled each time; domain seconds."
    )
    reclaim_patience_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds for which a call that needs the trainer's GPUs back goes on trying beyond those attempts, "
        "while an engine that may still use them is away. Clients wait 600 s for such a call by default.",
    )
    dark_after_s: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="Seconds without any replica that serves after which lent GPUs go back to the trainer, who alone "
        "can bring weights to replicas that came back.",
    )
    peer_attempts: int = Field(
        5,
        ge=1,
        le=1000,
        description="How often a wait at the buffer is taken up again before the trainer's call fails.",
    )
    peer_backoff_s: float = Field(
        0.2, ge=0, le=3600, description="Seconds before that is tried again, doubled each time."
    )
    progress_interval_s: float = Field(
        10.0,
        ge=2,
        le=10,
        description="Domain seconds between two readings of running requests and replica counters.",
    )
    progress_timeout_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Seconds given to an engine controller for a reading that a decision waits for; without it the "
        "policy goes on from the last one.",
    )
    watch_progress: bool = Field(
        True,
        description="Read running requests and replica counters: policies that predict and `turnout top` use them.",
    )
    event_history: int = Field(
        100_000,
        ge=1000,
        le=10_000_000,
        description="Events kept per run for WatchRun; older ones are trimmed, as are those beyond 64 MiB.",
    )

    @model_validator(mode="after")
    def _durable(self) -> Self:
        durability_of(self.durability, self.data_dir)
        return self

    @property
    def level(self) -> Durability:
        """The durability that holds."""
        return durability_of(self.durability, self.data_dir)
