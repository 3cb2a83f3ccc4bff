"""Which open run holds which GPU.

Invariant: a GPU, known by node and UUID, is held by at most one open run, which is closed only once its engines
are confirmed free or said to be gone; a refused claim takes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.runtime.errors import failed_precondition


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One device of one node."""

    node: str
    uuid: str


class Holdings:
    """The hybrid GPUs of all open runs."""

    def __init__(self) -> None:
        self._holders: dict[Gpu, str] = {}
        self.revision = 0
        """Changes with every change of who holds what."""

    def claim(self, run_id: str, gpus: Iterable[Gpu]) -> None:
        """Let `run_id` hold exactly `gpus`. Raises FAILED_PRECONDITION / GPU_HELD, naming GPU and holder."""
        wanted = set(gpus)
        for gpu in sorted(wanted):
            holder = self._holders.get(gpu, run_id)
            if holder != run_id:
                raise failed_precondition(
                    "GPU_HELD",
                    f"GPU {gpu.uuid} of node {gpu.node} is held by the open run {holder!r}",
                    node=gpu.node,
                    gpu_uuid=gpu.uuid,
                    held_by=holder,
                    run_id=run_id,
                )
        if wanted == self.of(run_id):
            return
        self.release(run_id)
        self._holders.update(dict.fromkeys(wanted, run_id))

    def of(self, run_id: str) -> frozenset[Gpu]:
        """What `run_id` holds."""
        return frozenset(gpu for gpu, holder in self._holders.items() if holder == run_id)

    def release(self, run_id: str) -> None:
        """`run_id` holds nothing any more."""
        self.revision += 1
        self._holders = {gpu: holder for gpu, holder in self._holders.items() if holder != run_id}
