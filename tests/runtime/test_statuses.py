"""Errors as statuses: one ErrorInfo, within the limits of the wire."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.errors import Code, TurnoutError, not_found
from services.runtime.statuses import MAX_MESSAGE_BYTES, Outcome, cut, from_rpc_error, outcome_of, status_of


def _info(error: TurnoutError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    (detail,) = status_of(error).details
    assert detail.Unpack(info)
    return info


def test_a_status_carries_code_message_and_one_error_info() -> None:
    """Programs match on the reason; without it they would parse prose."""
    error = not_found("RUN_NOT_FOUND", "no run 'x'", run_id="x")
    status = status_of(error)
    info = _info(error)
    assert (status.code, status.message) == (5, "no run 'x'")
    assert (info.domain, info.reason, dict(info.metadata)) == ("turnout", "RUN_NOT_FOUND", {"run_id": "x"})


def _wire_bytes(error: TurnoutError) -> int:
    """The size of the trailers, reckoned apart from the code under test: percent-encoding and base64."""
    status = status_of(error)
    message = "".join(
        chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in status.message.encode()
    )
    return len(message) + -(-len(status.SerializeToString()) // 3) * 4


@given(
    message=st.text(max_size=4000) | st.integers(1, 8000).map(lambda n: "组" * n),
    metadata=st.dictionaries(st.text(min_size=1, max_size=100), st.text(max_size=3000), max_size=40),
)
def test_h51_trailers_stay_within_their_limit(message: str, metadata: dict[str, str]) -> None:
    """A peer refuses a header list beyond 8 kB, and the caller would see a bare error instead of ours."""
    error = TurnoutError(Code.INVALID_ARGUMENT, "BAD_ID", message, metadata)
    assert _wire_bytes(error) <= 6000
    assert len(status_of(error).message.encode()) <= MAX_MESSAGE_BYTES
    assert _info(error).reason == "BAD_ID"


@given(st.text(max_size=50), st.integers(4, 60))
def test_text_is_cut_between_characters(text: str, limit: int) -> None:
    """Half a character would make the whole status impossible to parse."""
    short = cut(text, limit)
    assert len(short.encode()) <= limit
    assert short == text or text.startswith(short.removesuffix("…"))


def test_a_lone_surrogate_can_be_reported() -> None:
    """A message about text that cannot be encoded must itself be encodable."""
    assert status_of(not_found("X", "bad \ud800 text")).message == "bad ? text"


def test_the_first_metadata_survive_a_cut() -> None:
    """The field and its value come first; later entries are what may go."""
    error = TurnoutError(Code.INTERNAL, "X", "m", {"field": "step"} | {f"k{n}": "v" * 4000 for n in range(40)})
    metadata = _info(error).metadata
    assert metadata["field"] == "step"
    assert 1 < len(metadata) < 41


def test_outcomes_of_items_mirror_errors() -> None:
    """An item that went well has an empty outcome, another says what a status would have said."""
    assert outcome_of(None) == Outcome(0, "", "", {})
    assert outcome_of(not_found("GROUP_NOT_FOUND", "gone", group_id="g")) == Outcome(
        5, "GROUP_NOT_FOUND", "gone", {"group_id": "g"}
    )


def test_an_error_that_is_no_call_is_unknown() -> None:
    """Client libraries raise bare RpcErrors too; they must not break the mapping itself."""
    assert from_rpc_error(grpc.RpcError("odd")).code is Code.UNKNOWN
