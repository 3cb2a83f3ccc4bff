"""The ways in which a piece of a page is dealt with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Scene = Literal["bare", "job"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """It is executed, by tests/docs/test_blocks.py, as it stands but for what is named here."""

    scene: Scene = "job"
    """`job`: beside three services with engines, in which the trainer of the client's README has trained a few steps as
    `my-run`. `bare`: nothing runs."""
    change: Mapping[str, str] = field(default_factory=dict)
    """Placeholders of the page, and figures that would take too long."""
    add: str = ""
    """Arguments that make it shorter."""
    before: str = ""
    """A command that comes first."""
    given: str = ""
    """Python that a snippet takes for granted: names that are the reader's own."""
    then: str = ""
    """Python that looks at what a snippet has done."""
    prints: str = ""
    """What its output has to have, as a pattern."""
    until: str = ""
    """It does not end by itself: it runs until its output has this pattern, and on beside the rest of the page."""
    ends: bool = False
    """With `until`: it is ended there, and has to end in order."""
    alone: bool = False
    """What the page has started before it ends first."""
    code: int = 0
    """The exit code."""
    slow: bool = False
    """It takes more than some seconds."""
    needs: str = ""
    """A Python module or a file of the checkout without which it is left out, and said to be."""
    timeout_s: float = 50


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A snippet that makes the scene `job`, so whatever runs in that scene runs it."""

    given: str
    change: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """A test in another environment executes it, or one that needs more than a place of its own."""

    make: str
    """The target that runs the test."""
    test: str
    """FILE::TEST; empty where the target itself is meant."""


@dataclass(frozen=True)
class Never:
    """Nothing here can execute it; a reason is given."""

    reason: str


@dataclass(frozen=True)
class Shown:
    """It is no command: a picture, a format, what a program prints."""

    what: str


How = Run | Stage | Elsewhere | Never | Shown

NEEDS: Final = {
    "torch": "test-stores",
    "ray": "test-ray",
    "verl": "test-verl",
    "vllm": "test-vllm",
    "node_modules": "protos-lint",
}
"""Which target runs, or installs, what has such a need."""

GPU: Final = "a GPU"
CLUSTER: Final = "a cluster of Kubernetes and a registry"
SLURM: Final = "a cluster with Slurm"
SYSTEMD: Final = "systemd as the first process"
