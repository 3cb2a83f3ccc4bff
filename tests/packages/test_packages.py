"""What users install: complete, and working at the lowest and at the newest versions of what it stands on."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients_langs.world import Service, running
from tests.packages.distributions import ROOT, SOURCES, Built, Environment, build, lowest, run

PACKAGES = {"turnout": "clients/python/turnout", "turnout_services": "services"}
MODULES = """
import importlib, pkgutil, turnout
skipped = ("turnout.integrations", "turnout.ray", "turnout.stores._", "turnout.tensors")
for module in pkgutil.walk_packages(turnout.__path__, "turnout."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
"""
"""Everything of the client but what its extras are for."""

EXTRAS = {
    "vllm": "vllm",
    "ray": "ray",
    "transferqueue": "transferqueue",
    "otel": "opentelemetry-exporter-otlp-proto-http",
}
"""What each extra of the services brings."""

BESIDE = {".venv-verl": "test-verl", ".venv-ray": "test-stores", ".venv-vllm": "test-vllm"}
"""Environments of others, and what makes them."""

CALL = """
import importlib.metadata as metadata, sys
own, target = sys.argv[1:]
sys.path.insert(0, own)
from pip._vendor.packaging.requirements import Requirement
declared = [Requirement(text) for text in metadata.distribution("turnout").requires]
needed = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
unmet = [str(one) for one in needed if not one.specifier.contains(metadata.version(one.name), prereleases=True)]
import turnout
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import BufferClient
assert turnout.__file__.startswith(own), turnout.__file__
with BufferClient(target) as buffer:
    buffer.calls.CreateRun(pb.CreateRunRequest(run_id="beside"))
    groups = [pb.GroupSpec(group_id="g", group_size=2)]
    buffer.calls.AddGroups(pb.AddGroupsRequest(run_id="beside", partition="train", step=1, groups=groups))
    print(f"unmet: {unmet}, added: {buffer.calls.GetLedger(pb.GetLedgerRequest(run_id='beside')).added}")
"""
"""What the wheel declares against what is there, and calls through the wheel."""

TOOLS = ("pytest>=8.2", "pytest-asyncio>=0.24", "pytest-timeout>=2.3", "hypothesis>=6.100", "trustme>=1.1")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Both distributions."""
    directory = tmp_path_factory.mktemp("dist")
    return {name: build(name, directory) for name in SOURCES}


@pytest.mark.parametrize("name", SOURCES)
def test_wheel_and_sdist_hold_every_file_of_the_package(name: str, built: dict[str, Built]) -> None:
    """A workload or a page's template that is left out is missed on the user's machine only."""
    folder = PACKAGES[name]
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    prefix = folder.removesuffix("turnout").removesuffix("services")
    wanted = {line.removeprefix(prefix) for line in listed.splitlines() if (ROOT / line).exists()}
    assert len(wanted) > 20
    with zipfile.ZipFile(built[name].wheel) as wheel:
        assert wanted - set(wheel.namelist()) == set()
        assert {path for path in wheel.namelist() if path.endswith((".pyc", "~"))} == set()
    with tarfile.open(built[name].sdist) as sdist:
        assert wanted - {path.partition("/")[2] for path in sdist.getnames()} == set()


@dataclass(frozen=True)
class Installed:
    """Clean environments with the wheels."""

    client: Environment
    services: Environment
    tests: Path
    """A folder with our tests and nothing else of the source tree."""

    def case(self, *paths: str) -> str:
        """Run the tests of a case against what is installed; warnings are errors there as they are here."""
        return self.services.run("python", "-P", "-m", "pytest", "-q", "-c", "pytest.ini", *paths, cwd=self.tests)


@pytest.fixture(scope="module", params=["lowest", "newest"])
def installed(
    request: pytest.FixtureRequest, built: dict[str, Built], tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """The wheels at the lowest or the newest versions that they allow."""
    directory = tmp_path_factory.mktemp(request.param)
    pins = {name: lowest(name) if request.param == "lowest" else [] for name in SOURCES}
    client = Environment(directory / "client")
    client.install(built["turnout"].wheel, pins=pins["turnout"])
    services = Environment(directory / "services")
    both = [*pins["turnout"], *pins["turnout_services"]]
    services.install(built["turnout"].wheel, built["turnout_services"].wheel, pins=both)
    services.install(*TOOLS, pins=both)
    copied = directory / "copied"
    shutil.copytree(ROOT / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    (copied / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "addopts = --import-mode=importlib\nfilterwarnings = error\ntimeout = 120\nmarkers =\n"
        + "".join(f"    {marker}\n" for marker in settings["markers"])
    )
    return Installed(client, services, copied)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_h59_installed_alone_client_and_services_run_the_whole_loop(installed: Installed) -> None:
    """Code generated by a newer protobuf does not import at an older one; a pin that is too low fails at a user's."""
    installed.client.run("python", "-W", "error", "-c", MODULES)
    assert "turnout-services" in installed.services.run("turnout", "version")
    installed.services.run("turnout", "simulate", "--steps", "3", "--policy", "off,verl,jit")
    # verl tries a lend as long as no wait was measured.
    small = ("--steps", "3", "--time-scale", "0.04", "--policy", "verl", "--no-picture")
    printed = installed.services.run("turnout", "demo", *small, "--json")
    result = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    lent = result["seeds"][0]["on"]
    assert (lent["lends"] > 0, lent["lost_groups"], lent["duplicated_groups"]) == (True, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_h53_event_loops_and_threads_of_an_installed_client(installed: Installed) -> None:
    """What works in a checkout may be missing from the wheel, or need a newer gRPC than it asks for."""
    assert " passed" in installed.case("tests/client/cases/test_h53_event_loops.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_h54_a_fork_of_an_installed_client(installed: Installed) -> None:
    """As for H53."""
    assert " passed" in installed.case("tests/client/cases/test_h54_fork.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_h58_boundary_numbers_of_installed_stubs(installed: Installed) -> None:
    """As for H53."""
    assert " passed" in installed.case("tests/buffer/cases/test_numbers_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_extras_can_be_resolved(built: dict[str, Built], tmp_path: Path) -> None:
    """An extra whose bounds contradict ours is found by whoever installs it, after a long download."""
    alone = Environment(tmp_path / "alone")
    client, services = built["turnout"].wheel, built["turnout_services"].wheel
    for extra, brings in EXTRAS.items():
        assert {brings, "turnout", "turnout-services"} <= alone.resolve(client, f"{services}[{extra}]"), extra
    sdk = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    assert {"turnout", *sdk} <= alone.resolve(f"{client}[otel]", *sdk)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BESIDE)
async def test_the_client_stands_beside_what_trainers_have(name: str, built: dict[str, Built], tmp_path: Path) -> None:
    """A client that needs another protobuf or gRPC than verl, Ray or vLLM cannot be installed where it is wanted.

    The wheel is laid before the environment that the tests of that name use, with whatever versions that has.
    """
    python = ROOT / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not there: make {BESIDE[name]} makes it")
    own, call = tmp_path / "own", tmp_path / "call.py"
    into = ("--no-deps", "--target", own)
    installing = (python, "-m", "pip", "install", "--quiet", *into, built["turnout"].wheel)
    await asyncio.to_thread(run, installing)
    call.write_text(CALL)
    service = Service("buffer")
    async with running(service):
        printed = await asyncio.to_thread(run, [python, "-I", call, own, service.target], 300, cwd=tmp_path)
    assert printed.splitlines()[-1] == "unmet: [], added: 1"
