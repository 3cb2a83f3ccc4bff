"""What the replay buffer can be told."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.runtime.config import ServiceSettings, Strings, settings_config
from services.runtime.journal import DURABILITY_HELP, Durability, durability_of


class BufferSettings(ServiceSettings):
    """Settings of the replay buffer."""

    model_config = settings_config("buffer")

    listen: Strings = Field(
        ["127.0.0.1:50051"],
        min_length=1,
        description="Where to listen: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 takes a free port and prints it.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory, on a local disk, for all that must survive a restart; without one nothing does, and "
        "there are no checkpoints.",
    )
    durability: Durability | None = Field(
        None,
        description=f"With a data directory, {DURABILITY_HELP}. Default: os with a data directory, else none.",
    )
    payload_memory: int = Field(
        128 << 20, ge=0, description="Bytes of payloads kept in memory as a read cache over the data directory."
    )

    @model_validator(mode="after")
    def _durable(self) -> Self:
        durability_of(self.durability, self.data_dir)
        return self

    @property
    def level(self) -> Durability:
        """The durability that holds."""
        return durability_of(self.durability, self.data_dir)
