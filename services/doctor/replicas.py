"""What the engines of a run can do, as their controller tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from services.doctor.finding import Finding, ok, problem, warning
from turnout.engine.v1 import engine_pb2

SLEEPS: Final = "sleep"
"""Capability without which a lend frees nothing."""

_HEALTH: Final = {
    engine_pb2.REPLICA_HEALTH_UNRESPONSIVE: "does not answer",
    engine_pb2.REPLICA_HEALTH_DEAD: "is dead",
}


def check_replicas(run_id: str, replicas: Iterable[engine_pb2.Replica]) -> Iterator[Finding]:
    """Whether each answers, and can do what its role asks of it."""
    for replica in replicas:
        spec = replica.spec
        subject = f"{run_id} {spec.replica_id}"
        can = sorted(replica.capabilities)
        if replica.health in _HEALTH:
            advice = f"look at the engine at {spec.endpoint or spec.backend}; restarted there, it is found again"
            yield problem(
                "engines", subject, f"{_HEALTH[replica.health]}: {replica.reason or 'no reason told'}", advice
            )
        elif spec.role == engine_pb2.REPLICA_ROLE_HYBRID and SLEEPS not in can and not _keeps_memory(replica):
            advice = "start the engine with sleep mode (vLLM: --enable-sleep-mode), else its memory cannot be lent back"
            yield problem("engines", subject, "is hybrid and cannot sleep", advice)
        elif not can:
            advice = f"upgrade the engine, or look at docs/vllm.md and docs/sglang.md for what {spec.backend} needs"
            yield warning("engines", subject, "offers none of the calls that lending uses", advice)
        else:
            yield ok("engines", subject, f"{spec.backend}: {', '.join(can)}")


def _keeps_memory(replica: engine_pb2.Replica) -> bool:
    """A replica that never sleeps by its flags: pausing it is enough."""
    flags = replica.spec.flags
    return (flags.HasField("free_cache_engine") and not flags.free_cache_engine) or flags.node_rank != 0
