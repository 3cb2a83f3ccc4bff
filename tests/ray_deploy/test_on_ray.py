"""A deployment on a real cluster of two nodes: what starts, what is refused, what comes back, what ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from tests.ray_deploy.raylets import Raylets, raylets
from turnout import ray as deployments

pytestmark = [
    pytest.mark.timeout(300),
    # Ray's own.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

WITHIN_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(rollout="rollout") as running:
        yield running


def described(name: str, **more: Any) -> dict[str, Any]:
    free = {"port": 0}
    return {
        "name": name,
        "run": "r",
        "trainer": {"resource": "head"},
        "insecure": True,
        "services": {"buffer": free, "engine": free, "scheduler": free},
        "agents": [{"name": "rollout", "role": "standalone", "resource": "rollout", "nodes": 1, "replicas": 2}],
        **more,
    }


@pytest.fixture
def name(cluster: Raylets) -> Iterator[str]:
    """Of a deployment that the test makes."""
    made = f"d{time.monotonic_ns()}"
    yield made
    with contextlib.suppress(deployments.DeploymentError):
        deployments.down(made)


def states(name: str) -> dict[str, deployments.MemberState]:
    return {one.name: one.state for one in deployments.status(name) if one.state is not None}


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.2)


def well(name: str) -> bool:
    return not any(one.problem for one in deployments.status(name))


def test_what_is_killed_comes_back_where_it_was(cluster: Raylets, name: str, tmp_path: Path) -> None:
    """Clients keep their addresses: whatever ends, a service, its actor or its node, has to be there again."""
    spec = deployments.parse(described(name, data_dir=str(tmp_path)))
    made = deployments.up(spec, ready_within_s=WITHIN_S)
    assert deployments.up(spec) == made, "a second time changes nothing"
    assert deployments.connect(name) == made
    before = states(name)
    pid = before["engine"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.kill(before["buffer"].supervisor_pid, signal.SIGKILL)
    cluster.kill("rollout")
    until(lambda: not states(name).keys() >= {"rollout-0"})
    cluster.add("rollout", "rollout")
    until(lambda: well(name) and states(name)["buffer"].supervisor_pid != before["buffer"].supervisor_pid)
    after = states(name)
    assert {one: state.target for one, state in after.items()} == {one: state.target for one, state in before.items()}
    assert after["engine"].starts == 2
    assert "signal 9" in after["engine"].last_end
    assert after["scheduler"].pid == before["scheduler"].pid, "what was not killed goes on"
    assert after["rollout-0"].node != before["rollout-0"].node
    assert deployments.down(name) == ["buffer", "engine", "rollout-0", "scheduler"]
    with pytest.raises(deployments.DeploymentError, match="no deployment"):
        deployments.status(name)
    assert not [one for one in after.values() if one.pid and Path(f"/proc/{one.pid}").exists()]


@pytest.mark.slow
def test_a_deployment_outlives_the_command_that_made_it(cluster: Raylets, name: str, tmp_path: Path) -> None:
    """The command ends when all serve, and so does a job that called it; Ray ends what is not detached with them."""
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(described(name, agents=[])))

    def turnout(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli.main", "ray", *arguments, "--address", cluster.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    up = turnout("up", str(path), "--json")
    assert up.returncode == 0, up.stderr
    status = turnout("status", "--name", name, "--json")
    assert status.returncode == 0, status.stderr
    targets = {one["name"]: one["state"]["target"] for one in json.loads(status.stdout)["members"]}
    told = json.loads(up.stdout)
    assert targets == {service: told[service] for service in ("buffer", "engine", "scheduler")}
    down = turnout("down", "--name", name)
    assert (down.returncode, len(down.stdout.splitlines())) == (0, 3), down.stderr


@pytest.mark.slow
def test_a_service_that_cannot_start_says_why_and_leaves_nothing(cluster: Raylets, name: str) -> None:
    """A deployment of which half runs is worse than none."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        services = {"buffer": {"port": port}, "engine": {"port": 0}, "scheduler": {"port": 0}}
        spec = deployments.parse(described(name, services=services, agents=[]))
        with pytest.raises(deployments.DeploymentError, match="address in use"):
            deployments.up(spec, ready_within_s=30.0)
    with pytest.raises(deployments.DeploymentError, match="no deployment"):
        deployments.status(name)


def test_what_no_node_offers_is_refused_before_anything_starts(cluster: Raylets, name: str) -> None:
    """Ray would wait for such a node for ever, without a word."""
    elsewhere = described(name, trainer={"ip": "10.255.0.1"}, agents=[])
    with pytest.raises(deployments.DeploymentError, match=r"no node 10\.255\.0\.1 in the cluster"):
        deployments.up(deployments.parse(elsewhere))
    group = {"name": "rollout", "role": "standalone", "resource": "rollout", "nodes": 2}
    with pytest.raises(deployments.DeploymentError, match="offers 1 of the resource 'rollout', 2 needed"):
        deployments.up(deployments.parse(described(name, agents=[group])))


@pytest.mark.slow
def test_another_description_under_the_same_name_is_refused(cluster: Raylets, name: str) -> None:
    """It would change nothing, and look as if it had."""
    deployments.up(deployments.parse(described(name, agents=[])), ready_within_s=WITHIN_S)
    with pytest.raises(deployments.DeploymentError, match="engine runs already, described otherwise"):
        deployments.up(deployments.parse(described(name, agents=[], run="other")))
