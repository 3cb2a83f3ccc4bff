"""`turnout engine register` before it calls anyone."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from services.cli.engine_register import engine_register


@pytest.mark.parametrize(("replica", "named"), [("r0:trainer", "hybrid, standalone"), ("r0", "not ID:ROLE")])
def test_a_replica_that_cannot_be_read_is_a_usage_error(replica: str, named: str) -> None:
    """It is read as the replicas of an agent are, and no controller is asked about it."""
    command = ["my-run", "--replica", replica, "--backend", "vllm-http", "--engine", "127.0.0.1:1"]
    result = CliRunner().invoke(engine_register, command)
    assert result.exit_code == 2
    assert named in result.output
