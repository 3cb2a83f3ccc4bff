"""The whole job with real processes and real engines, short: what it claims of each step holds from the first on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from services.demo.events import Event
from services.learner.figures import FREED_SHARE, figures
from services.learner.job import HYBRID, STANDALONE, Job
from services.learner.recorder import MemoryRecorder
from services.learner.run import run_job
from services.learner.supply import sample_file

JOB = Job(seed=11, steps=3, batch_size=4, group_size=4, hybrid_kv_bytes=256 << 20)


@pytest.mark.slow
@pytest.mark.smoke
async def test_engines_compute_what_was_trained_and_give_their_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sync reaches both replicas while there is a lend, nothing is lost, and nothing is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    events: list[Event] = []
    recorder = MemoryRecorder(JOB, events.append)
    await run_job(JOB, sample_file(), recorder)
    found = figures(JOB, recorder.events)
    assert (found.steps, found.syncs, found.syncs_with_equal_output, found.lost_groups) == (3, 4, 4, 0)
    assert found.lends == JOB.steps, "at the beginning and after every step but the last"
    assert found.freed_share >= FREED_SHARE
    synced = [event for event in events if event.name == "synced"]
    assert [sorted(event["replicas"]) for event in synced] == [[HYBRID, STANDALONE]] * 3 + [[STANDALONE]]
    trained = [event["group_id"] for event in events if event.name == "group_trained"]
    assert len(trained) == len(set(trained)) == JOB.total_groups
    # The engine and the trainer compute the same probabilities from the same weights.
    assert all(event["ratio_error"] < 1e-3 for event in events if event.name == "learned")
    assert os.listdir(tmp_path) == []
    assert psutil.Process().children(recursive=True) == []
