"""The report of a run: its books, its page, its picture."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policies import shadow
from services.scheduler.policies.types import Action
from services.views.report import account_of, draw, render
from services.views.report.account import RunAccount
from services.views.report.scale import Scale, nice_step, thinned
from services.views.run_events import EventsError, line_of, read_events, write_events
from tests.views.stream import Stream, decision, steps
from turnout.scheduler.v1 import events_pb2

LEND, KEEP = events_pb2.DECISION_ACTION_LEND, events_pb2.DECISION_ACTION_KEEP


@pytest.fixture(scope="module")
def account() -> RunAccount:
    return account_of(steps(6))


def test_the_parts_of_a_step_add_up_to_its_time(account: RunAccount) -> None:
    """Nothing is counted twice and nothing is left out, or the bars mislead."""
    assert [step.number for step in account.steps] == [1, 2, 3, 4, 5, 6]
    for step in account.steps:
        assert step.ended_at is not None
        assert step.train_s is not None
        parts = step.train_s + step.wait_s + step.lent_s + step.reclaim_s
        assert parts == pytest.approx(step.ended_at - step.began_at)
        assert step.train_s == pytest.approx(256, abs=1)
        assert step.sync_s == 18
        assert (step.recomputed, step.blackout_s) == (1000 * step.number, 2.0)


def test_lends_are_followed_from_the_order_to_the_return(account: RunAccount) -> None:
    """One at the start, and one after each step but 3 and the last."""
    assert [lend.kind for lend in account.lends] == ["at the start", *["at a step's end"] * 4]
    for lend in account.lends:
        assert lend.served_s is not None
        assert lend.back_at is not None
        assert lend.back_at - lend.served_at == pytest.approx(lend.served_s + lend.reclaim_s)
        assert lend.brought is not None
        assert lend.brought.decoded_tokens == pytest.approx(16_000 * lend.served_s, rel=0.01)
        assert lend.saved_s == pytest.approx(2 * lend.served_s - lend.switch_s, rel=0.02)
        assert lend.gained_s == pytest.approx(30 - lend.switch_s)
    assert [step.reclaimed_at_depth for step in account.steps] == [40, 40, 40, None, 40, 40]


def test_a_lend_that_nothing_was_told_of_yet_claims_nothing() -> None:
    """What it brought is known when its step is over; a report of before must not make it up."""
    stream = Stream()
    stream.lend(events_pb2.LEND_KIND_STEP_END)
    stream.wait(20)
    stream.reclaim()
    account = account_of(stream.events)
    (lend,) = account.lends
    assert (lend.brought, lend.saved_s, lend.gained_s) == (None, None, None)
    assert "still lent" not in render(account, "run")
    stream.settle()
    (lend,) = account_of(stream.events).lends
    assert lend.brought is not None
    assert lend.brought.decoded_tokens == 16_000 * 20


def test_predictions_meet_what_came(account: RunAccount) -> None:
    """A reclaim's prediction belongs to its step, that of not lending to the next one."""
    predicted = [step.predicted_wait_s for step in account.steps]
    assert predicted[3] == 20.0
    assert all(value is not None for value in predicted)
    assert account.prediction_error_s is not None
    assert account_of([]).prediction_error_s is None


def test_a_hybrid_replica_sleeps_while_the_trainer_has_its_gpus(account: RunAccount) -> None:
    """And its stretches cover the run without overlap."""
    rows = {row.label: row.stretches for row in account.lanes.rows()}
    assert list(rows) == ["standalone-0", "standalone-1", *[f"hybrid-{n}" for n in range(4)], "trainer"]
    for stretches in rows.values():
        assert all(a.end <= b.start for a, b in pairwise(stretches))
    states = {stretch.state for stretch in rows["hybrid-0"]}
    assert states == {"asleep", "updating", "decoding"}
    lent = sum(stretch.end - stretch.start for stretch in rows["hybrid-0"] if stretch.state == "decoding")
    assert lent == pytest.approx(sum(lend.served_s or 0.0 for lend in account.lends), abs=10 * len(account.lends))


def test_ages_are_steps_since_a_group_was_added() -> None:
    """A group that is given back is not counted; one that was added before the kept events neither."""
    stream = Stream()
    stream.tell(groups_added=events_pb2.GroupsAdded(group_ids=["a", "b"], born_step=1))
    stream.tell(step_began=events_pb2.StepBegan(step=3))
    for group_id in ("a", "b", "unknown"):
        stream.tell(group_left=events_pb2.GroupLeft(group_id=group_id, how="GROUP_EVENT_KIND_SAMPLED"))  # type: ignore[arg-type]
    stream.tell(group_left=events_pb2.GroupLeft(group_id="b", how="GROUP_EVENT_KIND_RETURNED"))  # type: ignore[arg-type]
    account = account_of(stream.events)
    assert account.steps[0].ages == [2]
    assert account.mean_age == 2


@given(st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_any_beginning_and_any_end_of_a_stream_can_be_reported(cut: int) -> None:
    """Old events are trimmed, and a report is asked for in the middle of a step."""
    events = steps(3)
    for part in (events[cut:], events[: cut + 1]):
        page = render(account_of(part), "run")
        assert "</html>" in page
    assert ("no longer kept" in render(account_of(events[cut:]), "run")) == (0 < cut < len(events))


def test_folding_twice_changes_nothing() -> None:
    """A reader that connects again sees events again."""
    events = steps(3)
    once, twice = account_of(events), account_of([*events, *events])
    assert render(once, "run") == render(twice, "run")


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_needs_nothing_but_itself(account: RunAccount) -> None:
    """It is handed on, and opened where there is no network."""
    page = render(account, "run")
    parser = References()
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"@import|url\(|https?://", page)


def test_text_of_the_run_cannot_become_part_of_the_page() -> None:
    """Ids and reasons are anybody's."""
    evil = "</title><script>alert(1)</script>"
    stream = Stream()
    stream.tell(decision_made=decision(1, 4, 2, evil))  # type: ignore[arg-type]
    stream.tell(run_closed=events_pb2.RunClosed(reason=evil))
    stream.tell(lend_abandoned=events_pb2.LendAbandoned(lend_id="l", reason=evil))
    page = render(account_of(stream.events), evil)
    assert "<script>alert" not in page
    assert page.count("alert(1)") == 5


def test_the_charts_are_drawings_that_parse(account: RunAccount) -> None:
    """Every chart is well-formed, with a rectangle for every stretch that can be seen."""
    page = render(account, "run")
    charts = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 5
    rectangles = charts[0].findall("rect")
    assert len(rectangles) == sum(len(row.stretches) for row in account.lanes.rows())
    assert all(float(rectangle.attrib["width"]) > 0 for rectangle in rectangles)


def test_a_long_run_stays_a_page_that_opens() -> None:
    """150 steps, 20 000 events: a page of megabytes would be none."""
    account = account_of(steps(150))
    assert len(account.steps) == 150
    assert len(render(account, "run")) < 1_500_000


def test_the_picture_is_one(account: RunAccount, tmp_path: Path) -> None:
    """Also of a run with nothing in it."""
    for name, one in (("run", account), ("empty", account_of([]))):
        draw(one, name, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_events_survive_a_file(tmp_path: Path) -> None:
    """What is kept today is reported on next month."""
    path = tmp_path / "run.jsonl"
    events = steps(2)
    write_events(events, path)
    assert list(read_events(path)) == events


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"sequence": "x"}', '{"unknown": 1}'])
def test_a_file_that_holds_no_events_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    """A user may mix up the demo's event file and a run's."""
    path = tmp_path / "run.jsonl"
    path.write_text(line_of(steps(1)[0]) + "\n" + line + "\n")
    with pytest.raises(EventsError, match=r"run\.jsonl, line 2: no run event"):
        list(read_events(path))


def test_ticks_are_round_and_few() -> None:
    """Of seconds, hours and days."""
    for length in (7.0, 90.0, 4_000.0, 60_000.0, 900_000.0):
        ticks = Scale(13.0, 13.0 + length).ticks()
        assert 2 <= len(ticks) <= 13
        assert all(13 <= tick <= 13 + length for tick in ticks)
    assert [nice_step(value) for value in (0.7, 1.0, 3.1, 60.0)] == [1.0, 1.0, 5.0, 100.0]


def test_a_thinned_line_keeps_its_peaks() -> None:
    """They are what is looked for."""
    points = [(float(n), 100.0 if n == 777 else float(n % 5)) for n in range(10_000)]
    kept = thinned(points, 500)
    assert len(kept) <= 501
    assert (777.0, 100.0) in kept
    assert kept == sorted(kept)


def test_the_page_says_what_a_policy_in_the_shadow_would_have_done() -> None:
    """Whoever tries a policy in the shadow reads the report to decide on it."""
    stream = Stream()
    for step, (action, heard, gain) in enumerate(
        ((LEND, Action.LEND, 30.0), (KEEP, Action.LEND, 12.0), (KEEP, Action.KEEP, -4.0))
    ):
        made = decision(step, events_pb2.DECISION_POINT_STEP_END, action, "So.")
        made.policy = "shadow:jit"
        made.numbers["shadow_action"] = shadow._CODES[heard]
        made.numbers["shadow_gain_seconds"] = gain
        made.numbers["shadow_differs"] = float((action == LEND) != (heard is Action.LEND))
        stream.tell(decision_made=made)
    page = render(account_of(stream.events), "run")
    assert (
        "In the shadow, jit would have lent at 2 of 3 step ends, expecting to gain 42 s in all; lent was at 1, and "
        "they differed at 1." in page
    )
    assert "In the shadow" not in render(account_of(steps(2)), "run")
