"""The oracle is only worth something if it sees what goes wrong: each test plants one fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak import book
from tests.soak.oracle import Fates, Told, compare, compare_work, fates_of, told_to_trainer, told_to_workers
from tests.soak.report import STUCK_S, Report, slope
from tests.soak.witness import Seen, Witness
from turnout.buffer.v1 import buffer_pb2 as pb

TRAINER: list[book.Entry] = [
    {"kind": "adding", "at": 1.0, "numbers": [1, 2], "request": "r"},
    {"kind": "added", "at": 1.1, "ids": ["r-1", "r-2"]},
    {"kind": "adding", "at": 1.2, "numbers": [3], "request": ""},
    {"kind": "leased", "at": 2.0, "lease": "l1", "ids": ["r-1"], "marks": [["r-1", 0, "w.1.1"]]},
    {"kind": "committing", "at": 2.1, "lease": "l1", "ids": ["r-1"]},
    {"kind": "committed", "at": 2.2, "lease": "l1", "ids": ["r-1"]},
]
EVENTS = [
    *(Seen("ADDED", group) for group in ("r-1", "r-2", "r-3")),
    Seen("TRAJECTORY_FINISHED", "r-1", 0),
    Seen("COMMITTED", "r-1"),
    Seen("EVICTED", "r-2"),
    Seen("EVICTED", "r-3"),
]
LEDGER = (3, 1, 2)
WORKER: list[book.Entry] = [
    {"kind": "sent", "at": 1.5, "items": [["r-1", 0, "w.1.1"]]},
    {"kind": "told", "at": 1.6, "items": [["r-1", 0, "w.1.1", 0]]},
]


def judge(
    trainer: list[book.Entry] = TRAINER,
    events: list[Seen] = EVENTS,
    worker: list[book.Entry] = WORKER,
    ledger: tuple[int, int, int] = LEDGER,
    present: int = 0,
) -> list[str]:
    told, fates = told_to_trainer("r", trainer), fates_of("r", events)
    return [*compare("r", told, fates, ledger, present), *compare_work("r", told, fates, told_to_workers([worker]))]


def test_what_fits_together_passes() -> None:
    """The other tests change one thing of this."""
    assert judge() == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ledger": (4, 1, 2)}, "added by the ledger and by events: 4 against 3"),
        ({"ledger": (3, 2, 1)}, "committed by the ledger and by what the trainer was told: 2 against 1"),
        ({"ledger": (3, 1, 1)}, "evicted by the ledger and by events: 1 against 2"),
        ({"present": 1}, "groups left after draining: 1 against 0"),
        ({"events": EVENTS[1:]}, "added and acknowledged, but not seen: ['r-1']"),
        ({"events": [*EVENTS, Seen("ADDED", "r-9")]}, "seen, but never asked for: ['r-9']"),
        ({"events": EVENTS[:-1]}, "without a fate: ['r-3']"),
        ({"events": [*EVENTS, Seen("COMMITTED", "r-2")]}, "r-2 is COMMITTED after it was EVICTED"),
        ({"events": [*EVENTS, Seen("COMMITTED", "r-1")]}, "r-1 is COMMITTED after it was COMMITTED"),
        ({"events": [EVENTS[0], *EVENTS]}, "r-1 was added twice"),
        ({"events": [*EVENTS[:4], *EVENTS[3:]]}, "r-1/0 finished 2 times"),
        ({"events": [*EVENTS, Seen("RESTORED", "")]}, "restores told and seen: 0 against 1"),
        ({"trainer": TRAINER[:-1]}, "committed for the trainer and by events: ['r-1']"),
        ({"trainer": [*TRAINER, TRAINER[-1]]}, "the trainer got ['r-1'] twice"),
        (
            {"trainer": [*TRAINER, {"kind": "refused", "at": 3.0, "ids": ["r-3"], "reason": "X"}]},
            "refused, but seen: ['r-3']",
        ),
        ({"worker": []}, "the result w.1.1 of r-1/0 was never sent"),
        (
            {
                "worker": [
                    *WORKER,
                    {"kind": "sent", "at": 1.5, "items": [["r-1", 0, "v.1.1"]]},
                    {"kind": "told", "at": 1.6, "items": [["r-1", 0, "v.1.1", 0]]},
                ]
            },
            "v.1.1 of r-1/0 was acknowledged, and the trainer got w.1.1",
        ),
        (
            {
                "worker": [
                    *WORKER,
                    {"kind": "sent", "at": 1.5, "items": [["r-8", 0, "v.1.1"]]},
                    {"kind": "told", "at": 1.6, "items": [["r-8", 0, "v.1.1", 0]]},
                ]
            },
            "v.1.1 of r-8/0 was acknowledged, and the group is gone",
        ),
    ],
)
def test_a_planted_fault_is_found(changed: dict[str, object], said: str) -> None:
    """Each is a way in which a buffer could lose, double or invent something."""
    assert any(said in fault for fault in judge(**changed)), judge(**changed)  # type: ignore[arg-type]


def test_a_restore_makes_void_what_came_after_its_checkpoint() -> None:
    """A group that was committed after the checkpoint comes back and may be committed again, once."""
    trainer: list[book.Entry] = [
        *TRAINER[:3],
        {"kind": "checkpoint", "at": 1.9, "id": "c", "ids": ["r-1", "r-2"], "ledger": [2, 0, 0], "sure": True},
        *TRAINER[3:],
        {"kind": "restored", "at": 3.0, "id": "c", "step": 1},
        *({**entry, "lease": "l2"} for entry in TRAINER[3:]),
    ]
    events = [*EVENTS, Seen("RESTORED", ""), Seen("COMMITTED", "r-1"), Seen("EVICTED", "r-2")]
    assert judge(trainer, events, ledger=(2, 1, 1)) == []
    assert judge(trainer, events[:-1], ledger=(2, 1, 0)) == [
        "r: balance of the ledger: 2 against 1",
        "r: without a fate: ['r-2'] against []",
    ]


def test_a_witness_keeps_gaps_and_repeats() -> None:
    """An event that is told twice or never would make every other comparison worthless."""
    witness = Witness("r")
    for sequence in (1, 2, 4, 4):
        witness.take(pb.GroupEvent(sequence=sequence, kind=pb.GROUP_EVENT_KIND_ADDED, group_id="g"))
    witness.take(pb.GroupEvent(kind=pb.GROUP_EVENT_KIND_PROGRESS))
    assert witness.faults == ["event 4 of r came after event 2", "event 4 of r came after event 4"]


def test_a_line_that_a_kill_cut_short_is_no_entry(tmp_path: Path) -> None:
    """A kill in the middle of a write must not cost what was written before, or what comes after."""
    path = tmp_path / "book"
    first = book.Book(path)
    first.write("one", number=1)
    first.close()
    path.write_bytes(path.read_bytes() + b'{"kind": "tw')
    assert [entry["kind"] for entry in book.read(path)] == ["one"]
    second = book.Book(path)
    second.write("three")
    second.close()
    assert [entry["kind"] for entry in book.read(path)] == ["one", "three"]


def report(**changed: object) -> Report:
    plain = Report(
        seed=1,
        seconds=10.0,
        durability="os",
        wall_s=12.0,
        drain_s=1.0,
        small_disk=False,
        faults={"kill -9 of a worker": 2},
        service_lives=2,
        clock_shifts=1,
        started_in=[0.5, 0.7],
        recovered_in=[0.1, 2.0],
        service_errors={},
        refused_starts=0,
        ledgers={},
        audited=True,
        batches=3,
        committed=9,
        results_acknowledged=20,
        restores=0,
        resident_mib=[90.0, 91.0],
        resident_slope_mib_per_min=0.5,
        wrongs=[],
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_a_report_fails_for_a_fault_and_for_a_process_that_was_stuck() -> None:
    """A wait that never recovers is as bad as a lost group, though no ledger shows it."""
    assert report().passed
    assert "PASSED" in report().to_text()
    assert not report(wrongs=["lost"]).passed
    stuck = report(recovered_in=[1.0, STUCK_S + 1])
    assert not stuck.passed
    assert "stuck" in stuck.to_text()
    assert json.loads(json.dumps(stuck.to_json()))["passed"] is False


def test_the_slope_is_that_of_a_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(1, 1)]) == 0


def test_nothing_told_and_nothing_seen_is_a_balance() -> None:
    assert compare("r", Told(), Fates(), (0, 0, 0), 0) == []
