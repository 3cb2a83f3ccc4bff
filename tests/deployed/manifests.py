"""What the manifests of deploy/kubernetes start: the base with the component `tls` on top.

Invariant: no argument is made up here; a path or a port is put in the place of the one in the manifest.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
_KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
_ARGS: Final = "/spec/template/spec/containers/0/args/"


def arguments(workload: str) -> list[str]:
    """The arguments of `buffer`, `engine`, `scheduler`, `agent-standalone` or `agent-hybrid`, in order."""
    made = next(one for one in _base() if one["metadata"]["name"] == workload and _is_workload(one))
    found: list[str] = list(made["spec"]["template"]["spec"]["containers"][0]["args"])
    for patch in yaml.safe_load((_KUBERNETES / "tls" / "kustomization.yaml").read_text())["patches"]:
        target = patch["target"]
        if not re.fullmatch(target["kind"], made["kind"]) or not re.fullmatch(target.get("name", ".*"), workload):
            continue
        for step in yaml.safe_load(patch["patch"]):
            if step["path"].startswith(_ARGS):
                _apply(found, step, step["path"].removeprefix(_ARGS))
    return found


def _apply(found: list[str], step: dict[str, Any], place: str) -> None:
    match step["op"], place:
        case "test", _:
            assert found[int(place)] == step["value"]
        case "replace", _:
            found[int(place)] = step["value"]
        case "add", "-":
            found.append(step["value"])
        case unknown:
            raise ValueError(f"a step that this does not know: {unknown}")


def _is_workload(made: dict[str, Any]) -> bool:
    return made["kind"] in ("StatefulSet", "DaemonSet")


@functools.cache
def _base() -> list[dict[str, Any]]:
    paths = sorted((_KUBERNETES / "base").glob("*.yaml"))
    return [made for path in paths for made in yaml.safe_load_all(path.read_text()) if made and "metadata" in made]
