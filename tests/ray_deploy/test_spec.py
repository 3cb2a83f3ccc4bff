"""The YAML file of a deployment, and what it means; no Ray here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import cli
from tests.docs.test_pages import parse as parse_command
from turnout.ray import DeploymentError, load, parse
from turnout.ray._member import members, with_port

ROOT = Path(__file__).parents[2]


def described(**more: Any) -> dict[str, Any]:
    return {"run": "r", "trainer": {"resource": "head"}, **more}


def test_the_example_of_the_repository_describes_what_its_comments_say() -> None:
    """It is what everyone begins with."""
    spec = load(ROOT / "deploy" / "ray" / "cluster.yaml")
    made = {member.name: member for member in members(spec)}
    assert list(made) == ["buffer", "scheduler", "engine", "rollout-0", "hybrid-0", "hybrid-1"]
    assert made["buffer"].arguments[-4:] == ("--data-dir", "/var/lib/turnout/my-run/buffer", "--durability", "os")
    assert (made["rollout-0"].gpus, made["hybrid-1"].gpus) == (8.0, 0.0)
    assert made["hybrid-1"].resource == "node:10.0.0.7"
    assert [replica.replica_id for replica in made["rollout-0"].replicas] == ["rollout-0-0", "rollout-0-1"]
    assert made["rollout-0"].replicas[1].gpus == ("gpu-4", "gpu-5", "gpu-6", "gpu-7")


def test_with_tls_every_process_of_the_example_is_guarded() -> None:
    """One that was forgotten would not start, as other machines reach it; a flag that was renamed neither."""
    spec = load(ROOT / "deploy" / "ray" / "cluster-tls.yaml")
    assert not spec.insecure
    for member in members(spec):
        parse_command(cli, [member.service, "serve", *member.arguments])
        given = {word.partition("=")[0] for word in member.arguments}
        assert {"--tls-cert", "--tls-key", "--tls-client-ca", "--tokens-file"} <= given, member.name
        assert ("--peer-token-file" in given) == (member.name in ("engine", "scheduler"))
        assert ("TURNOUT_TOKEN_FILE" in dict(member.environment)) == bool(member.replicas)


def test_the_three_services_together_need_less_than_one_node_offers() -> None:
    """A whole unit each would leave two of them waiting for two more nodes."""
    assert sum(member.amount for member in members(parse(described()))) < 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"run": "r"}, "trainer is missing"),
        (described(trainers={}), "unknown setting trainers"),
        (described(trainer={}), "trainer: give either ip or resource"),
        (described(name="A b"), "name: "),
        (described(data_dir="data"), "data_dir: must be absolute"),
        (described(services={"buffer": {"port": 50052}}), "a port is given twice"),
        (described(services={"buffer": {"port": 70000}}), "services.buffer.port: "),
        (described(services={"buffers": {"port": 1}}), "unknown setting services.buffers"),
        (described(agents=[{"name": "a", "role": "hybrid", "resource": "x"}]), "resource needs nodes"),
        (described(agents=[{"name": "a", "role": "both", "resource": "x", "nodes": 1}]), "agents.0.role: "),
        (
            described(agents=[{"name": "a", "role": "hybrid", "ips": ["10.0.0.1"], "nodes": 1}]),
            "nodes goes with resource",
        ),
        (described(agents=[{"name": "a", "role": "hybrid", "ips": ["10.0.0.1"]}] * 2), "a name is given twice"),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_place(content: dict[str, Any], problem: str) -> None:
    """Otherwise it shows as a service that is not there, on a cluster that costs money."""
    with pytest.raises(DeploymentError) as caught:
        parse(content, "c.yaml")
    assert any(line.startswith("c.yaml: ") and problem in line for line in caught.value.problems)


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    """One a run would take a run for each."""
    path = tmp_path / "c.yaml"
    path.write_text("trainer: {}\nfoo: 1\n")
    with pytest.raises(DeploymentError) as caught:
        load(path)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("text", ["", "- a", "a: [", "\xff"])
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, text: str) -> None:
    """Not with a traceback."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DeploymentError, match=r"c\.yaml: "):
        load(path)
    with pytest.raises(DeploymentError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_a_chosen_port_is_kept_and_no_two_are_the_same() -> None:
    """Clients keep an address: a service that comes back elsewhere is lost to them."""
    member = next(members(parse(described(services={"buffer": {"port": 0}}))))
    taken = set(range(20_000, 29_999))
    assert with_port(member, random.Random(0), taken).port == 29_999
    assert with_port(member, random.Random(0), taken, known=12_345).port == 12_345
    given = next(members(parse(described())))
    assert with_port(given, random.Random(0), {50_051}, known=12_345).port == 50_051
