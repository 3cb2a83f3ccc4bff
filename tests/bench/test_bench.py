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
