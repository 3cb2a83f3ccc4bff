"""Which run a controller serves, and which trainer may command it.

Invariants: the run, once bound, never changes; the epoch only rises; a command with another epoch than the present
one is refused before anything else is looked at.
"""

from __future__ import annotations

from services.runtime.errors import (
    failed_precondition,
    invalid_argument,
    not_found,
    require_id,
    require_non_negative,
    stale_epoch,
    unknown_epoch,
)


class Fence:
    """The run and its epoch; 0 means that no epoch was ever opened."""

    def __init__(self, run_id: str = "", *, binds_at_any_call: bool = False) -> None:
        self.run_id = run_id
        self.epoch = 0
        self._binds_at_any_call = binds_at_any_call

    def restore(self, run_id: str, epoch: int) -> None:
        """Go on with what an earlier controller knew; another run is FAILED_PRECONDITION / RUN_BOUND."""
        if run_id:
            self.bind(run_id)
        self.epoch = epoch

    def require_run(self, run_id: str) -> None:
        """Refuse other runs with NOT_FOUND / RUN_NOT_FOUND."""
        require_id("run_id", run_id)
        if not self.run_id and self._binds_at_any_call:
            self.run_id = run_id
        if run_id != self.run_id:
            raise not_found("RUN_NOT_FOUND", f"this controller does not serve run {run_id!r}", run_id=run_id)

    def check_binding(self, run_id: str) -> None:
        """Refuse a run that cannot be bound any more."""
        require_id("run_id", run_id)
        if self.run_id and run_id != self.run_id:
            raise failed_precondition("RUN_BOUND", f"this controller serves run {self.run_id!r}", run_id=self.run_id)

    def bind(self, run_id: str) -> None:
        """Serve this run from now on."""
        self.check_binding(run_id)
        self.run_id = run_id

    def open_epoch(self, run_id: str, epoch: int | None) -> int:
        """Set the fencing token; None is the present one + 1."""
        self.check_binding(run_id)
        chosen = self.epoch + 1 if epoch is None else require_non_negative("epoch", epoch)
        if chosen <= self.epoch:
            raise stale_epoch(chosen, self.epoch)
        if chosen > 2**62:
            raise invalid_argument("epoch", "an epoch must leave room for its successors", value=chosen)
        self.bind(run_id)
        self.epoch = chosen
        return chosen

    def check(self, run_id: str, epoch: int | None) -> None:
        """Refuse a command of another run or epoch."""
        self.require_run(run_id)
        self.check_epoch(epoch)

    def check_epoch(self, epoch: int | None) -> None:
        """Refuse a command of another epoch."""
        if epoch is None:
            if self.epoch:
                raise failed_precondition(
                    "EPOCH_REQUIRED", f"the run's epoch is {self.epoch}: say yours", field="epoch", current=self.epoch
                )
        elif epoch < self.epoch:
            raise stale_epoch(epoch, self.epoch)
        elif epoch > self.epoch:
            raise unknown_epoch(epoch, self.epoch)
