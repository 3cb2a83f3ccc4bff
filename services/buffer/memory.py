"""Memory: all that a service knows and a restart must bring back.

Invariant: it follows from what was decided, in the order in which it was: nothing in it depends on who is connected.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from services.buffer.domain.external import Externals
from services.buffer.domain.runs import Runs
from services.runtime.idempotency import Answers


@dataclass(slots=True, eq=False)
class Memory:
    """Runs, their external payloads, and first answers; `created` counts the runs ever made.

    `now` is the domain time of the last decision.
    """

    runs: Runs = field(default_factory=Runs)
    externals: Externals = field(default_factory=Externals)
    # By call: a request_id is scoped to its run and call.
    answers: defaultdict[str, Answers] = field(default_factory=lambda: defaultdict(Answers))
    created: int = 0
    now: float = 0.0

    def forget_answers(self, run_id: str) -> None:
        """The run is gone."""
        for answers in self.answers.values():
            answers.forget_run(run_id)
