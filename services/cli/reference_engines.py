"""The reference engines that `turnout up` brings on demand, so that a trainer can be tried without a GPU."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import click

from services.processes.child import Child, ChildSpec
from services.processes.registering import register_agent
from services.processes.service import service_spec
from turnout.client import AsyncEngineClient, ClientOptions

_NAME: Final = "agent"
_METRICS: Final = "TURNOUT_ENGINE_METRICS_LISTEN"
_DATA: Final = "TURNOUT_ENGINE_DATA_DIR"
"""These are the controller's: an agent on the same port or with the same journal would keep it from starting."""

_MEAN_TOKENS: Final = 200
"""Of an output: about two seconds, so that a first try shows something at once."""
_WEIGHT_BYTES: Final = 32 << 20
"""The largest model that fits into one; it is held in memory."""


@dataclass(frozen=True, slots=True)
class ReferenceEngines:
    """One agent with so many hybrid and standalone replicas, for one run."""

    run_id: str
    hybrid: int
    standalone: int

    @classmethod
    def parse(cls, run_id: str | None, counts: str | None) -> Self | None:
        """Read the two options; None if neither is given. Raises UsageError."""
        if (run_id is None) != (counts is None):
            raise click.UsageError("--run and --reference belong together")
        if run_id is None or counts is None:
            return None
        found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", counts)
        if found is None or not int(found[2]):
            raise click.UsageError(
                f"--reference {counts}: it is HYBRID:STANDALONE, such as 1:1, one standalone at least"
            )
        return cls(run_id, int(found[1]), int(found[2]))

    def spec(self, *flags: str) -> ChildSpec:
        """Return how to start the agent."""
        replicas = [f"hybrid-{n}:hybrid" for n in range(self.hybrid)]
        replicas += [f"standalone-{n}:standalone" for n in range(self.standalone)]
        named = [text for replica in replicas for text in ("--replica", replica)]
        model = ("--length-mean", str(_MEAN_TOKENS), "--weights-bytes", str(_WEIGHT_BYTES))
        listen = ["--listen", "127.0.0.1:0"]
        if os.environ.get(_METRICS):
            listen += ["--metrics-listen", "127.0.0.1:0"]
        made = service_spec("engine", "--agent", "--no-replica-weights", *listen, *model, *named, *flags, name=_NAME)
        return dataclasses.replace(made, environment=dict.fromkeys((_METRICS, _DATA)))

    async def register(self, children: Iterable[Child], options: ClientOptions) -> list[str]:
        """Make the replicas known to the controller among these processes; returns their ids. Raises TurnoutError."""
        targets = {child.spec.name: child.target for child in children}
        async with AsyncEngineClient(targets["engine"], options) as client:
            replicas = await register_agent(client, targets[_NAME], self.run_id, {}, options)
        return [replica.spec.replica_id for replica in replicas]
