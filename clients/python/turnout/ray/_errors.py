"""What can go wrong with a deployment."""

from __future__ import annotations


class DeploymentError(Exception):
    """The deployment cannot be made, found or ended as asked; `problems` has one line for each fault."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)
