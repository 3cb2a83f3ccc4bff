"""The figures of a job are what its events say."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.demo.events import Event, in_order, read_events
from services.demo.figures import Delivered, Figures, IncompleteJob, delivered, figures, gain
from tests.demo.jobs import event, small_job


def test_figures_of_a_small_job() -> None:
    """Each figure by hand: a slip in one of them would make the whole comparison untrue."""
    assert figures(small_job()) == Figures(
        wall_clock_s=100.0,
        tokens_per_s=10.0,
        trainer_idle_share=0.3,
        steps=2,
        lends=1,
        reclaims=1,
        lost_groups=0,
        duplicated_groups=0,
        mean_staleness=0.5,
    )


def test_a_group_that_nobody_trained_on_is_lost() -> None:
    """A buffer that loses a group would look faster for it."""
    job = [e for e in small_job() if not (e.name == "group_trained" and e["group_id"] == "b/0")]
    assert figures(job).lost_groups == 1


def test_a_group_evicted_or_still_present_is_not_lost() -> None:
    """What the rules removed, or what the job's end left over, is accounted for."""
    job = [e for e in small_job() if not (e.name == "group_trained" and e["group_id"] == "b/0")]
    evicted = [e for e in job if e.name != "ledger"] + [
        event(99, "group_left", group_id="b/0", how="evicted", reasons=["stale"]),
        event(100, "ledger", added=2, committed=1, evicted=1, present=0),
    ]
    assert figures(evicted).lost_groups == 0
    present = [e for e in job if e.name != "ledger"] + [
        event(100, "ledger", added=2, committed=1, evicted=0, present=1)
    ]
    assert figures(present).lost_groups == 0


def test_books_that_do_not_balance_are_lost_groups() -> None:
    """The buffer may not forget what the trainer never saw."""
    job = [e for e in small_job() if e.name != "ledger"]
    assert figures([*job, event(100, "ledger", added=5, committed=2, evicted=0, present=0)]).lost_groups == 3
    assert figures([*job, event(100, "ledger", added=2, committed=1, evicted=0, present=1)]).lost_groups == 1


def test_a_group_trained_on_twice_is_duplicated() -> None:
    """The same data twice is a silent change of the training."""
    again = event(
        90, "group_trained", group_id="a/0", step=2, mini_batch=1, tokens=[100, 200], staleness=[1, 1], digest=""
    )
    assert figures([*small_job(), again]).duplicated_groups == 1


def test_a_group_that_was_never_added_is_duplicated() -> None:
    """Data from nowhere is as bad as data twice."""
    alien = event(90, "group_trained", group_id="z/0", step=2, mini_batch=1, tokens=[1], staleness=[0])
    assert figures([*small_job(), alien]).duplicated_groups == 1


def test_validation_and_initial_lends_are_not_counted() -> None:
    """The figure is 'at most one lend per step', which only the policy's decisions are about."""
    extra = [event(80, "lend", lend_id="l2", kind="validation", cost_s=1.0), event(81, "reclaim", cost_s=1.0)]
    assert (figures(in_order([*small_job(), *extra])).lends, figures(in_order([*small_job(), *extra])).reclaims) == (
        1,
        1,
    )


@pytest.mark.parametrize("missing", ["job_began", "job_ended", "ledger"])
def test_a_job_without_an_end_has_no_figures(missing: str) -> None:
    """Figures of half a job would be compared with those of a whole one."""
    with pytest.raises(IncompleteJob, match=missing):
        figures([e for e in small_job() if e.name != missing])


def test_gain_is_the_share_of_the_wall_clock_saved() -> None:
    """Sign and base of the one number everybody looks at."""
    off = figures(small_job())
    faster = Figures(**{**off.to_dict(), "wall_clock_s": 88.0})
    assert gain(off, faster) == pytest.approx(0.12)
    assert gain(faster, off) < 0


def test_events_survive_their_file(tmp_path: Path) -> None:
    """An outsider has the file alone."""
    path = tmp_path / "events.jsonl"
    path.write_text("".join(e.to_line(7, "on") + "\n" for e in small_job()), encoding="utf-8")
    read = list(read_events(path))
    assert {(seed, mode) for seed, mode, _ in read} == {(7, "on")}
    assert figures(e for _, _, e in read) == figures(small_job())
    assert delivered(e for _, _, e in read) == {
        "a/0": Delivered((100, 200), "0a"),
        "b/0": Delivered((300, 400), "0b"),
    }


def test_events_are_put_in_order_of_time_and_keep_ties_as_seen() -> None:
    """A stretch of a row ends where the next begins; a swapped pair would turn it around."""
    events = [Event(2, "b"), Event(1, "a"), Event(2, "c")]
    assert [e.name for e in in_order(events)] == ["a", "b", "c"]
