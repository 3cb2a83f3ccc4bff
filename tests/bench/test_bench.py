"""The parts of the benches that can be checked without measuring."""

from __future__ import annotations

import json
import os
import time

import pytest

from services.bench.cpu import processor_seconds
from services.bench.result import Result


def test_a_result_is_one_json_object_with_its_ratio() -> None:
    """Whoever plots the figures reads these five keys."""
    line = json.loads(Result("a", "s", 3.0, 2.0).to_line())
    assert line == {"name": "a", "unit": "s", "value": 3.0, "baseline": 2.0, "ratio": 1.5}
    assert json.loads(Result("a", "s", 3.0, 0.0).to_line())["ratio"] is None


def test_a_figure_tells_whether_it_reached_its_limit() -> None:
    """A time may be at most, a rate at least: one comparison for both would pass the worst of one of them."""
    slow, fast = Result("a", "ms", 12.0, 5.0, limit=10.0), Result("a", "ms", 8.0, 5.0, limit=10.0)
    few, many = (Result("b", "tokens/s", rate, 100.0, limit=95.0, at_least=True) for rate in (94.0, 96.0))
    assert [one.met for one in (slow, fast, few, many)] == [False, True, False, True]
    line = json.loads(slow.to_line())
    assert (line["limit"], line["met"]) == (10.0, False)
    assert slow.to_text() == "a: 12 ms (bare: 5), at most 10: MISSED"
    assert many.to_text() == "b: 96 tokens/s (bare: 100), at least 95: met"


def test_processor_time_is_that_of_the_process() -> None:
    """Reading the wrong fields of /proc would make every service look idle."""
    before = processor_seconds([os.getpid()])
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    used = processor_seconds([os.getpid()]) - before
    assert 0.1 < used < 2.0


def test_a_process_that_does_not_exist_is_an_error() -> None:
    """A service that has died uses no processor time at all; that must not pass for a good result."""
    with pytest.raises(OSError, match="stat"):
        processor_seconds([2**22 + 1])
