"""Events of made-up jobs."""

from __future__ import annotations

from typing import Any

from services.demo.events import Event

REPLICAS = [
    {"replica_id": "standalone-0", "role": "standalone"},
    {"replica_id": "hybrid-0", "role": "hybrid"},
]


def event(at: float, name: str, **values: Any) -> Event:
    """Return an event."""
    return Event(at, name, values)


def trained(at: float, group_id: str, **values: Any) -> Event:
    """Return the event of a group that was trained on in the first mini-batch."""
    return event(at, "group_trained", group_id=group_id, mini_batch=0, **values)


def small_job() -> list[Event]:
    """Return a job of 100 s: two groups, a lend, 30 s of waiting."""
    return [
        event(0, "job_began", replicas=REPLICAS, steps=2),
        event(0, "trainer", state="updating", step=0),
        event(0, "replica", replica_id="standalone-0", state="idle"),
        event(0, "replica", replica_id="hybrid-0", state="asleep"),
        event(1, "lend", lend_id="l0", kind="init", cost_s=1.0),
        event(2, "group_added", group_id="a/0", prompt_id="a", step=1, trajectories=2),
        event(2, "group_added", group_id="b/0", prompt_id="b", step=1, trajectories=2),
        event(2, "replica", replica_id="standalone-0", state="decoding"),
        event(3, "reclaim", cost_s=1.0),
        event(10, "trainer", state="waiting", step=1),
        event(30, "trainer", state="training", step=1),
        trained(30, "a/0", step=1, tokens=[100, 200], staleness=[0, 0], digest="0a"),
        event(60, "step_ended", step=1),
        event(60, "lend", lend_id="l1", kind="step_end", cost_s=4.0),
        event(60, "trainer", state="waiting", step=2),
        event(70, "reclaim", cost_s=2.0),
        event(70, "trainer", state="training", step=2),
        trained(70, "b/0", step=2, tokens=[300, 400], staleness=[1, 1], digest="0b"),
        event(100, "step_ended", step=2),
        event(100, "ledger", added=2, committed=2, evicted=0, present=0),
        event(100, "job_ended", real_seconds=3.0),
    ]
