"""Waits and the best moment to reclaim, in cases that can be computed by hand."""

import numpy as np
import pytest

from services.scheduler.policies.jit.outlook import Outlook, Setting


def setting(**changes: float) -> Setting:
    """Speed does not depend on the load: with one standalone and one hybrid replica lending gains nothing but order."""
    values = {
        "hybrids": 3,
        "standalones": 1,
        "base": 0.0,
        "slope": 0.001,
        "prefill": 1e9,
        "lend_s": 10.0,
        "reclaim_s": 5.0,
        "mini_batch": 1,
        "mini_batch_s": 100.0,
        "stretch": 1.0,
    }
    return Setting(**(values | changes))  # type: ignore[arg-type]


def outlook(left: list[float], known: Setting) -> Outlook:
    """Groups of one member, with certain lengths, all on hybrid replicas."""
    tokens = np.array(left, dtype=np.float64)[:, None]
    count = len(left)
    return Outlook(tokens, np.arange(count), np.zeros(count), np.ones(count, dtype=np.bool_), known)


def test_waits_are_walked_in_order() -> None:
    """One mini-batch trains while the next is generated: only what training does not cover is waited for.

    Two groups of 50 000 and 200 000 tokens decode alone at 1 ms a token and request: 100 s and 250 s.
    """
    made = outlook([50_000, 200_000], setting())
    needed = made.needed(np.arange(2), 0, 2, 0.0)
    alone = made.flow.alone(needed, 0.0, 0.0)
    assert alone.wait_s == pytest.approx(100 + 50, rel=0.05)
    assert alone.end_s == pytest.approx(350, rel=0.05)


def test_groups_at_hand_are_not_waited_for() -> None:
    """Two groups are sampleable, so the first of the four that are needed is the third."""
    made = outlook([50_000, 50_000], setting())
    needed = made.needed(np.arange(2), 2, 4, 0.0)
    assert needed[0].tolist()[:2] == [0.0, 0.0]
    assert made.flow.alone(needed, 0.0, 0.0).wait_s == pytest.approx(0.0, abs=1e-6)


def test_a_lend_ends_when_waiting_longer_would_not_end_the_step_sooner() -> None:
    """Too early starves the trainer later; too late keeps it from training.

    One group is there; the other needs 400 000 tokens: 400 s alone, 100 s with all four replicas. Training covers 105 s
    of it (with the reclaim), that is 105 000 tokens, so the first 295 000 have to be decoded while GPUs are lent: 74 s.
    """
    made = outlook([400_000], setting())
    needed = made.needed(np.arange(1), 1, 2, 0.0)
    best = made.flow.lent(needed, 0.0, 0.0, 0.0)
    assert best.reclaim_in_s == pytest.approx(74, abs=6)
    assert best.wait_s == pytest.approx(0, abs=8)
    assert best.foreseen_s <= best.end_s


def test_moved_tokens_have_a_price() -> None:
    """With slow prefill it is better to keep the GPUs until nothing is left to move."""
    tokens = np.array([[400_000.0]])
    prefix, hybrid = np.array([100_000.0]), np.ones(1, dtype=np.bool_)
    ends = []
    for prefill in (1e9, 200.0):
        made = Outlook(tokens, np.arange(1), prefix, hybrid, setting(prefill=prefill))
        needed = made.needed(np.arange(1), 1, 2, 0.0)
        ends.append(made.flow.lent(needed, 0.0, 0.0, 0.0).reclaim_in_s)
    assert ends[1] > ends[0] + 15


def test_a_group_that_outlived_a_scenario_is_not_expected_at_once() -> None:
    """Counting it as due now would reclaim too early, again and again: its other scenarios stand in."""
    left = np.array([[100.0, 1000.0, 2000.0, 3000.0]])
    made = Outlook(left, np.arange(1), np.zeros(1), np.zeros(1, dtype=np.bool_), setting())
    needed = made.needed(np.arange(1), 0, 1, 500.0)
    assert needed.min() >= 1000
    beyond = made.needed(np.arange(1), 0, 1, 5000.0)
    assert (beyond > 5000).all()


def test_stretch_makes_a_reclaim_later() -> None:
    """Predictions that were too hopeful before are trusted less."""
    ends = []
    for stretch in (1.0, 1.4):
        made = outlook([400_000], setting(stretch=stretch))
        needed = made.needed(np.arange(1), 1, 2, 0.0)
        ends.append(made.flow.lent(needed, 0.0, 0.0, 0.0).reclaim_in_s)
    assert ends[1] > ends[0] + 5
