"""What the replay buffer can be told."""

from pydantic import Field

from services.runtime.config import ServiceSettings, Strings, settings_config


class BufferSettings(ServiceSettings):
    """Settings of the replay buffer."""

    model_config = settings_config("buffer")

    listen: Strings = Field(
        ["127.0.0.1:50051"],
        min_length=1,
        description="Where to listen: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 takes a free port and prints it.",
    )
