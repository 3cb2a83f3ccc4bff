"""The figures of a job, from events of which each fault is one."""

from __future__ import annotations

from typing import Any

import pytest

from services.demo.events import Event
from services.learner.figures import IncompleteJob, figures
from services.learner.job import Job

STORAGES = 1100
JOB = Job(seed=7, steps=4)


def events(
    rewards: tuple[float, ...] = (0.0, 0.1, 0.5, 0.6),
    differing: tuple[str, ...] = (),
    committed: int = 2,
    trained: tuple[str, ...] = ("a", "b"),
    asleep: int = 2000,
    kept: int = 0,
) -> list[Event]:
    """The events of a job that went well, unless told otherwise."""
    made: list[tuple[str, dict[str, Any]]] = [("job_began", {})]
    made += [("group_added", {"group_id": name}) for name in ("a", "b")]
    # Before its first sleep a worker may not have touched all of its memory.
    made += [
        ("memory", reading(*one))
        for one in (
            (1, STORAGES, "awake"),
            (asleep, kept, "asleep"),
            (2, STORAGES, "between"),
            (3000, STORAGES, "awake"),
        )
    ]
    made += [("synced", {"version": 0, "replicas": ["h"], "differing": []})]
    made += [("group_trained", {"group_id": name}) for name in trained]
    for step, reward in enumerate(rewards, start=1):
        made += [("learned", {"step": step, "reward": reward}), ("lend", {}), ("step_ended", {"step": step})]
    made += [("synced", {"version": 4, "replicas": ["h"], "differing": list(differing)})]
    made += [("ledger", {"added": 2, "committed": committed, "evicted": 0, "present": 0})]
    return [Event(float(at), name, values) for at, (name, values) in enumerate(made)]


def reading(size: int, storages: int, state: str) -> dict[str, Any]:
    """What the hybrid replica's worker holds."""
    return {"replica_id": "hybrid-0", "bytes": size, "storages": storages, "state": state}


def test_a_job_that_went_well() -> None:
    """The names are those of the JSON object."""
    found = figures(JOB, events())
    assert found.faults() == []
    assert found.gain == pytest.approx(0.6)
    assert found.to_dict() == {
        "seed": 7,
        "rewards": [0.0, 0.1, 0.5, 0.6],
        "reward_range": (0.0, 1.0),
        "steps": 4,
        "lends": 4,
        "syncs": 2,
        "syncs_with_equal_output": 2,
        "lost_groups": 0,
        "worker_rss_awake": 3000,
        "worker_rss_asleep": 2000,
        "storage_bytes_freed": STORAGES,
    }


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"rewards": (0.5, 0.5, 0.5, 0.6)}, "the reward rose by 0.100"),
        ({"differing": ("h",)}, "after 1 of 2 syncs"),
        ({"trained": ("a",)}, "1 groups were lost"),
        ({"committed": 1}, "1 groups were lost"),
        ({"asleep": 2500}, "memory fell by 0.45"),
        ({"kept": STORAGES}, "memory fell by 0.00"),
    ],
)
def test_each_fault_is_named(changed: dict[str, Any], fault: str) -> None:
    """In a sentence with the seed."""
    [said] = figures(JOB, events(**changed)).faults()
    assert said.startswith("seed 7: ")
    assert fault in said


def test_a_sync_that_nobody_took_is_not_an_equal_one() -> None:
    """Nothing was compared."""
    found = figures(JOB, [*events(), Event(99.0, "synced", {"version": 5, "replicas": [], "differing": []})])
    assert (found.syncs, found.syncs_with_equal_output) == (3, 2)


@pytest.mark.parametrize("missing", ["ledger", "memory"])
def test_a_job_that_broke_off_has_no_figures(missing: str) -> None:
    """They would be those of something else."""
    with pytest.raises(IncompleteJob):
        figures(JOB, [event for event in events() if event.name != missing])
