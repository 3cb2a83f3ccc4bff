"""Errors, and the checks that raise them."""

from __future__ import annotations

import math

import grpc
import pytest

from services.runtime.errors import (
    Code,
    TurnoutError,
    invalid_argument,
    require_finite,
    require_id,
    require_non_negative,
    require_positive,
    stale_epoch,
)


def test_codes_are_those_of_grpc() -> None:
    """A shifted number would turn one status into another on the wire."""
    assert {code.name: int(code) for code in Code} == {code.name: code.value[0] for code in grpc.StatusCode}


def test_invalid_argument_names_field_and_value() -> None:
    """A caller must see which field was wrong without reading prose; a value of None is a value."""
    assert invalid_argument("step", "no").metadata == {"field": "step"}
    assert invalid_argument("step", "no", value=None, limit=3).metadata == {
        "field": "step",
        "value": "None",
        "limit": "3",
    }


def test_stale_epoch_names_both_epochs() -> None:
    """A fenced-off trainer must be able to tell by whom."""
    error = stale_epoch(3, 5)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")
    assert error.metadata == {"field": "epoch", "value": "3", "current": "5"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    """NaN passes every comparison as false and slips through limits written as comparisons."""
    for check in (require_finite, require_non_negative, require_positive):
        with pytest.raises(TurnoutError) as caught:
            check("ratio", value)
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert caught.value.metadata["field"] == "ratio"


def test_bounds_are_exact() -> None:
    """Zero is allowed where it means something and refused where it does not."""
    assert require_non_negative("target", 0) == 0
    assert require_positive("n", 1) == 1
    for check, value in ((require_non_negative, -1), (require_positive, 0)):
        with pytest.raises(TurnoutError):
            check("n", value)


@pytest.mark.parametrize("text", ["组-0", "🚀", "e\u0301", "é", "שלום", " ", "a/b", "../x", "x" * 512, "é" * 256])
def test_h52_odd_ids_are_kept_as_they_are(text: str) -> None:
    """Normalising or trimming an id would merge two groups of a caller."""
    assert require_id("group_id", text) == text


@pytest.mark.parametrize("text", ["", "a\x00b", "line\n", "\x7f", "x" * 513, "é" * 257, "\ud800"])
def test_h52_impossible_ids_are_refused_by_name(text: str) -> None:
    """Control characters break logs and headers, a lone surrogate cannot be encoded, and "" would mean unset."""
    with pytest.raises(TurnoutError) as caught:
        require_id("group_id", text)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, "BAD_ID")
    assert caught.value.metadata["field"] == "group_id"
    assert caught.value.metadata["value"].isascii()
