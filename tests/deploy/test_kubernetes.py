"""The manifests as kubectl renders them: what services are told, what the schemas allow, what holds together.

No cluster runs here.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.buffer.settings import BufferSettings
from services.engine.settings import EngineSettings
from services.runtime.config import ServiceSettings, load_settings
from services.scheduler.settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "buffer": BufferSettings,
    "engine": EngineSettings,
    "scheduler": SchedulerSettings,
}
PLACES = ("base", "example")

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not there")


@functools.cache
def rendered(place: str) -> list[dict[str, Any]]:
    """The objects of a directory of `deploy/kubernetes`."""
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / "kubernetes" / place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def pods(place: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Workload, pod and container of each."""
    for made in rendered(place):
        if made["kind"] in ("StatefulSet", "DaemonSet"):
            pod = made["spec"]["template"]["spec"]
            yield made, pod, pod["containers"][0]


@pytest.mark.parametrize("place", PLACES)
def test_every_argument_is_one_that_the_service_takes(place: str) -> None:
    """A flag that was renamed shows as a pod that never starts, on somebody's cluster."""
    seen = []
    for made, _, container in pods(place):
        service, serve, *arguments = container["args"]
        assert serve == "serve"
        flags: dict[str, Any] = {}
        for argument in arguments:
            name, given, value = argument.removeprefix("--").partition("=")
            key = name.removeprefix("no-").replace("-", "_")
            if not given:
                flags[key] = not name.startswith("no-")
            elif key in ("listen", "replica"):
                flags.setdefault(key, []).append(value.replace("$(NODE_NAME)", "node-7"))
            else:
                flags[key] = value
        settings = load_settings(SETTINGS[service], flags=flags)
        port = next(one["containerPort"] for one in container["ports"] if one["name"] == "grpc")
        assert settings.listen == [f"0.0.0.0:{port}"]
        assert settings.insecure == (place == "base"), "with TLS and tokens, --insecure is gone"
        seen.append(made["metadata"]["name"])
    assert sorted(seen) == ["agent-hybrid", "agent-standalone", "buffer", "engine", "scheduler"]


@pytest.mark.parametrize("place", PLACES)
def test_the_schemas_of_kubernetes_allow_it(place: str) -> None:
    """A misspelt field is dropped without a word by an older cluster, and a probe with it."""
    validate = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")
    for made in rendered(place):
        validate.validate(made, "1.29", strict=True)


@pytest.mark.parametrize("place", PLACES)
def test_no_container_is_root_or_may_become_it(place: str) -> None:
    """Nothing of Turnout needs it."""
    for _, pod, container in pods(place):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("place", PLACES)
def test_budgets_policies_and_services_select_pods_that_exist(place: str) -> None:
    """A selector that matches nothing protects nothing, and says nothing."""
    labels = [made["spec"]["template"]["metadata"]["labels"] for made, _, _ in pods(place)]
    for made in rendered(place):
        spec = made.get("spec", {})
        match made["kind"]:
            case "Service":
                selector = {"matchLabels": spec["selector"]}
            case "PodDisruptionBudget":
                selector = spec["selector"]
            case "NetworkPolicy":
                selector = spec["podSelector"]
            case _:
                continue
        assert any(selects(selector, one) for one in labels), made["metadata"]["name"]


def test_budgets_are_for_pods_that_a_drain_evicts() -> None:
    """The disruption controller knows no scale of a DaemonSet: a budget of one is an error event for ever."""
    budgets = [made["spec"]["selector"] for made in rendered("base") if made["kind"] == "PodDisruptionBudget"]
    for made, _, _ in pods("base"):
        labels = made["spec"]["template"]["metadata"]["labels"]
        assert any(selects(one, labels) for one in budgets) is (made["kind"] == "StatefulSet")


def test_everybody_may_read_the_secrets_that_are_mounted() -> None:
    """Files of a Secret are root's; without a group of the pod's own nobody else reads them, and agents never start."""
    for made, pod, _ in pods("example"):
        for volume in pod["volumes"]:
            if "secret" in volume:
                mode = volume["secret"]["defaultMode"]
                assert mode & 0o007 == 0, "others on the node could"
                assert mode & 0o040
                assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], made["metadata"][
                    "name"
                ]


def test_no_service_is_announced_as_plain_http2_where_it_speaks_tls() -> None:
    """A mesh or gateway believes `appProtocol`, and speaks plain text to a port that hangs up."""
    for place, told in (("base", "kubernetes.io/h2c"), ("example", None)):
        services = [made for made in rendered(place) if made["kind"] == "Service"]
        assert len(services) == 3
        assert {port.get("appProtocol") for made in services for port in made["spec"]["ports"][:1]} == {told}


CLIENT = {"turnout.dev/client": "true"}
TRAINER = {**CLIENT, "turnout.dev/weights": "true"}
STRANGER = {"app": "something-else"}
MONITORING = {"turnout.dev/metrics": "true"}
WAYS = [
    # caller, its namespace's labels, callee, port, whether it may
    (CLIENT, {}, "buffer", "grpc", True),
    (CLIENT, {}, "engine", "grpc", True),
    (CLIENT, {}, "scheduler", "grpc", True),
    (CLIENT, {}, "agent-hybrid", "grpc", False),
    (TRAINER, {}, "agent-standalone", "any", True),
    ("scheduler", {}, "buffer", "grpc", True),
    ("scheduler", {}, "engine", "grpc", True),
    ("scheduler", {}, "agent-hybrid", "grpc", False),
    ("engine", {}, "agent-hybrid", "grpc", True),
    ("engine", {}, "agent-standalone", "grpc", True),
    ("engine", {}, "buffer", "grpc", False),
    ("agent-standalone", {}, "engine", "grpc", True),
    ("agent-standalone", {}, "scheduler", "grpc", False),
    (STRANGER, {}, "buffer", "grpc", False),
    (STRANGER, {}, "agent-hybrid", "grpc", False),
    (STRANGER, {}, "scheduler", "metrics", False),
    *((STRANGER, MONITORING, name, "metrics", True) for name in ("buffer", "engine", "scheduler", "agent-hybrid")),
    (STRANGER, MONITORING, "buffer", "grpc", False),
]


@pytest.mark.parametrize(("caller", "namespace", "callee", "port", "allowed"), WAYS)
def test_the_policies_let_through_what_has_to_get_through_and_nothing_else(
    caller: dict[str, str] | str, namespace: dict[str, str], callee: str, port: str, allowed: bool
) -> None:
    """One way too few is a cluster on which nothing moves, one too many is an open door to the GPUs."""
    labels = {made["metadata"]["name"]: made["spec"]["template"]["metadata"]["labels"] for made, _, _ in pods("base")}
    own = labels[caller] if isinstance(caller, str) else caller
    rules = [
        rule
        for made in rendered("base")
        if made["kind"] == "NetworkPolicy" and "Ingress" in made["spec"]["policyTypes"]
        if selects(made["spec"]["podSelector"], labels[callee])
        for rule in made["spec"]["ingress"]
    ]
    assert rules, "nothing guards it"
    assert any(_lets(rule, own, namespace, port) for rule in rules) is allowed


def _lets(rule: dict[str, Any], caller: dict[str, str], namespace: dict[str, str], port: str) -> bool:
    def fits(peer: dict[str, Any]) -> bool:
        if "namespaceSelector" in peer:
            return selects(peer["namespaceSelector"], namespace)
        return not namespace and selects(peer["podSelector"], caller)

    ports = [one["port"] for one in rule.get("ports", ())]
    return any(fits(peer) for peer in rule["from"]) and (not ports or port in ports)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector matches."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )


def test_journals_are_on_volumes_and_probes_look_where_the_service_listens() -> None:
    """A journal in the container's own file system goes with the first restart."""
    for made, _, container in pods("base"):
        ports = {one["containerPort"] for one in container["ports"]}
        assert container["startupProbe"]["grpc"]["port"] in ports
        assert container["livenessProbe"]["tcpSocket"]["port"] in ports
        if made["kind"] == "StatefulSet":
            assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
            assert [one["metadata"]["name"] for one in made["spec"]["volumeClaimTemplates"]] == ["data"]
    for _, pod, container in pods("example"):
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
        assert all("grpc" not in probe for probe in probes), "the kubelet's gRPC probes know no TLS"
        assert {"tls", "tokens"} <= {volume["name"] for volume in pod["volumes"]}


def test_the_images_are_targets_of_the_dockerfile_and_none_runs_as_root() -> None:
    """What the manifests name has to be built from somewhere."""
    stages: dict[str, list[str]] = {}
    for line in (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("FROM "):
            stages[line.split()[-1]] = []
        elif stages:
            stages[list(stages)[-1]].append(line)
    images = {container["image"] for _, _, container in pods("base")}
    assert images == {"turnout-services", "turnout-agent"}
    for stage in ("services", "agent", "client"):
        assert [line for line in stages[stage] if line.startswith("USER ")] == ["USER 65532:65532"]
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [word for line in stages["wheels"] if line.startswith("COPY ") for word in line.split()[1:-1]]
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in kept
