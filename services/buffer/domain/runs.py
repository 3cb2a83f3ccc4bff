"""Runs: all training jobs of a service.

Invariant: a run id names one run from CreateRun to DeleteRun; runs share nothing.
"""

from collections.abc import Iterator

from services.buffer.domain.run import Run
from services.runtime.errors import TurnoutError, already_exists, not_found


class Runs:
    """Runs by id."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        """All runs, by id."""
        return iter(sorted(self._runs.values(), key=lambda run: run.run_id))

    def get(self, run_id: str) -> Run | None:
        """The run of that id, if there is one."""
        return self._runs.get(run_id)

    def require(self, run_id: str) -> Run:
        """The run of that id. Raises NOT_FOUND / RUN_NOT_FOUND."""
        run = self._runs.get(run_id)
        if run is None:
            raise run_not_found(run_id)
        return run

    def add(self, run: Run) -> None:
        """Enter a new run. Raises ALREADY_EXISTS / RUN_EXISTS."""
        if run.run_id in self._runs:
            message = f"run {run.run_id!r} exists with another configuration"
            raise already_exists("RUN_EXISTS", message, field="run_id", value=run.run_id)
        self._runs[run.run_id] = run

    def replace(self, run: Run) -> None:
        """Let a run take the place of the one of its id."""
        self._runs[run.run_id] = run

    def forget_all(self) -> None:
        """Forget every run, and leave what they keep outside as it is."""
        self._runs.clear()

    def remove(self, run: Run) -> None:
        """Forget a run, and name nothing for it in external stores; the rest of it is left to the caller."""
        del self._runs[run.run_id]
        run.state.payloads.let_external_go()


def run_not_found(run_id: str) -> TurnoutError:
    """There is no such run, or no longer."""
    return not_found("RUN_NOT_FOUND", f"no run {run_id!r}", field="run_id", value=run_id)
