"""A Probe as a process: `python -P -m tests.runtime.service_process ADDRESS [BEHAVIOR]`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

from services.runtime.config import ServiceSettings
from services.runtime.host import HostContext
from services.runtime.process import run_service
from services.runtime.waits import Wake, park
from tests.runtime.helpers import Probe


def main() -> int:
    address, behavior = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""

    def build(context: HostContext) -> Probe:
        async def stream(request: StringValue, _: Any) -> AsyncIterator[StringValue]:
            yield StringValue(value="here")
            await park(Wake(), context.clock.now() + 3600, clock=context.clock, draining=context.draining)

        async def hang() -> None:
            print("hanging", flush=True)
            await asyncio.Event().wait()

        return Probe(
            context,
            stream=stream,
            on_start=hang if behavior == "hang-at-start" else None,
            on_drain=hang if behavior == "hang-at-drain" else None,
        )

    return run_service("probe", ServiceSettings(listen=[address], grace_s=60), build)


if __name__ == "__main__":
    sys.exit(main())
