"""Who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICES = ("buffer", "engine", "scheduler")


def _imports(directory: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(directory.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node.module
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


def _within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("service", SERVICES)
def test_services_meet_through_stubs_alone(service: str) -> None:
    """A direct import would tie two services to one process and one release."""
    others = [f"services.{other}" for other in (*SERVICES, "cli", "demo", "learner") if other != service]
    wrong = [(str(path), module) for path, module in _imports(ROOT / "services" / service) if _within(module, *others)]
    assert wrong == []


@pytest.mark.parametrize("package", ["demo", "learner", "views"])
def test_what_stands_on_the_client_imports_no_service(package: str) -> None:
    """A demo that reaches into a service shows what no user can do."""
    services = [f"services.{service}" for service in SERVICES]
    wrong = [
        (str(path), module) for path, module in _imports(ROOT / "services" / package) if _within(module, *services)
    ]
    assert wrong == []


def test_the_client_imports_no_service() -> None:
    """It is installed alone, where there is no package `services`, or another one of that name."""
    wrong = [
        (str(path), module)
        for path, module in _imports(ROOT / "clients" / "python" / "turnout")
        if _within(module, "services")
    ]
    assert wrong == []


def test_the_runtime_knows_no_service() -> None:
    """What three services share must not depend on one of them; how a service is reached is no service's own."""
    wrong = [
        (str(path), module)
        for path, module in _imports(ROOT / "services" / "runtime")
        if _within(module, "services") and not _within(module, "services", "services.runtime")
    ]
    wrong += [
        (str(path), module)
        for path, module in _imports(ROOT / "services" / "runtime")
        if _within(module, *(f"services.{service}" for service in SERVICES), "turnout")
        and not _within(module, "turnout.channels", "turnout.tracing")
    ]
    assert wrong == []


def test_policies_load_no_grpc() -> None:
    """They are evaluated in simulators and notebooks, in any process and many at a time."""
    allowed = ("services.scheduler.policies", "numpy")
    wrong = [
        (str(path), module)
        for path, module in _imports(ROOT / "services" / "scheduler" / "policies")
        if _within(module, "services", "turnout", "grpc", "google", "asyncio") and not _within(module, *allowed)
    ]
    assert wrong == []
