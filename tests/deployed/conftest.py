"""The deployed form, once for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployed.site import Site


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site without members: certificates, tokens, and room for data directories."""
    with Site(tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site of the test's own, without members."""
    with Site(tmp_path / "site") as made:
        yield made
