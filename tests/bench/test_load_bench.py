"""The load bench: its judgement by itself, and a small load on the real deployment."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.bench.load import measure
from services.bench.load_ledger import RunLedger, read_notes
from services.bench.load_memory import slope
from services.bench.load_plan import Access, Errand, Plan
from services.bench.load_probe import ask_open_loop
from services.bench.load_process import Errors
from services.cli.bench_load import load
from turnout.buffer.v1 import buffer_pb2


def test_an_errand_comes_out_of_its_argument_as_it_went_in() -> None:
    """Processes that read different plans would wait for groups that nobody brings."""
    access = Access("b", "s", "e", {"load-0": "c"}, {"reader": "file"}, "ca.pem")
    errand = Errand(Plan(rate=3.5), access, ("load-0", "load-1"), "ledger")
    assert Errand.from_argument(errand.to_argument()) == errand


@pytest.mark.parametrize(
    ("groups", "rate", "why"),
    [(40, 40, "the trainers take 160 groups every 4 s"), (320, 40, "more than twice as many"), (41, 1, "multiples")],
)
def test_a_load_that_cannot_be_offered_is_refused(groups: int, rate: int, why: str) -> None:
    """Trainers that wait for more groups than there are wait for ever, and the bench with them."""
    done = CliRunner().invoke(load, ["--groups", str(groups), "--rate", str(rate), "--workers", "4"])
    assert done.exit_code == 2
    assert why in done.output


def test_a_growth_is_told_from_noise_by_its_margin() -> None:
    """A slope without a margin calls the saw-tooth of a collector a leak, or a leak a saw-tooth."""
    flat = slope([(at, 100.0 + at % 7) for at in range(300)])
    growing = slope([(at, 100.0 + at % 7 + 2 * at / 60) for at in range(300)])
    assert abs(flat.per_minute) <= flat.margin
    assert growing.per_minute == pytest.approx(2, abs=growing.margin)
    assert growing.per_minute > 3 * growing.margin
    with pytest.raises(ValueError, match="too few"):
        slope([(0.0, 1.0)] * 3)


def _ledger() -> RunLedger:
    """A run of three groups: one committed, one evicted, one there."""
    ledger = RunLedger("r")
    notes = ['["r", "added", ["a", "b", "c"]]', '["r", "sampled", ["a"]]', '["r", "committed", ["a"]]']
    read_notes(notes, {"r": ledger})
    added, evicted = buffer_pb2.GROUP_EVENT_KIND_ADDED, buffer_pb2.GROUP_EVENT_KIND_EVICTED
    for number, (kind, group_id) in enumerate([(added, "a"), (added, "b"), (added, "c"), (evicted, "b")], start=1):
        reasons = [buffer_pb2.EVICTION_REASON_STALE] if kind == evicted else []
        ledger.take(buffer_pb2.GroupEvent(sequence=number, kind=kind, group_id=group_id, reasons=reasons))
    ledger.present = {"c"}
    ledger.counts = buffer_pb2.GetLedgerResponse(added=3, committed=1, evicted=1)
    return ledger


def test_every_group_is_accounted_for_once() -> None:
    """The bench is there to find a lost id; a ledger that overlooks one finds nothing."""
    assert _ledger().faults() == []

    lost = _ledger()
    lost.present.clear()
    assert lost.faults() == ["r: 1 groups are lost: c"]

    twice = _ledger()
    twice.note("sampled", ["a"])
    assert twice.faults() == ["r: 1 groups were sampled more than once: a"]

    invented = _ledger()
    invented.note("added", ["d"])
    assert invented.faults() == ["r: 1 groups were acknowledged and not added: d"]

    silent = _ledger()
    silent.evicted["b"] = ()
    assert silent.faults() == ["r: 1 groups were evicted without a reason: b"]

    gap = _ledger()
    gap.take(buffer_pb2.GroupEvent(sequence=6, kind=buffer_pb2.GROUP_EVENT_KIND_STARTED, group_id="c"))
    assert gap.faults() == ["r: 1 gaps in the events"]

    miscounted = _ledger()
    miscounted.counts.committed = 2
    assert miscounted.faults() == ["r: the ledger says added, committed, evicted = (3, 2, 1), the ids (3, 1, 1)"]


async def test_a_stall_shows_in_every_query_that_was_due_in_it() -> None:
    """A client that waits for its answer before it asks again sees one slow query where there were many."""
    stalled = asyncio.Event()
    stop = asyncio.Event()
    freed_at = 0.0

    async def call(number: int) -> None:
        if number == 9:
            nonlocal freed_at
            freed_at = time.perf_counter()
            stalled.set()
            stop.set()
        await stalled.wait()

    began = time.perf_counter()
    (taken,) = await ask_open_loop([call], 0.02, stop, errors := Errors())
    assert errors.count == 0
    assert len(taken) == 10
    # Query n was due at n intervals and waited for the last one.
    assert max(taken) >= freed_at - began - 0.02
    assert sum(seconds > 0.08 for seconds in taken) >= 5


@pytest.mark.timeout(150)
async def test_a_small_load_leaves_no_error_and_no_lost_group(tmp_path: Path) -> None:
    """All of the deployment over TLS with tokens: what breaks under the real load mostly breaks here."""
    plan = Plan(seconds=6, runs=1, workers=2, groups=20, rate=2, payload_bytes=600)
    said: list[str] = []
    results = await measure(plan, tmp_path, secure=shutil.which("openssl") is not None, say=said.append)
    figures = {result.name: result for result in results}
    assert figures["load_errors"].value == 0, said
    assert figures["load_ledger_faults"].value == 0, said
    assert figures["load_depth_p99"].value > 0
    assert figures["load_groups"].value > 0
    assert figures["load_memory_buffer"].value > 10
