"""Ray, as far as a deployment needs it.

Invariant: a cluster is joined and never started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from turnout.ray._errors import DeploymentError
from turnout.ray._member import ANSWER_S, NAMESPACE, Member
from turnout.ray._supervisor import Supervisor

_CALLS: Final = 8
"""At once, so that a status never waits for a stop."""


def join(address: str) -> Any:
    """Join the cluster unless this process is in one; returns the module `ray`. Raises DeploymentError."""
    try:
        import ray
    except ImportError as error:
        raise DeploymentError("Ray is not installed here: pip install 'turnout[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())[:300]
            raise DeploymentError(f"no Ray cluster at {address!r}: {text}") from error
    return ray


def check_resources(ray: Any, wanted: Iterable[Member]) -> None:
    """Raise DeploymentError for every resource that the nodes of the cluster have too little of."""
    total: dict[str, float] = dict(ray.cluster_resources())
    needs: dict[str, float] = {}
    for member in wanted:
        needs[member.resource] = needs.get(member.resource, 0.0) + member.amount
    problems = []
    for resource, amount in needs.items():
        has = total.get(resource, 0.0)
        if has >= amount:
            continue
        if resource.startswith("node:"):
            there = sorted(
                name.removeprefix("node:") for name in total if name.startswith("node:") and "__" not in name
            )
            problems.append(f"no node {resource.removeprefix('node:')} in the cluster; there are: {', '.join(there)}")
        else:
            start = f"""ray start ... --resources='{{"{resource}": 1}}'"""
            problems.append(
                f"the cluster offers {has:g} of the resource {resource!r}, {round(amount + 0.4999):g} needed; "
                f"a node offers it when it is started with {start}"
            )
    if problems:
        raise DeploymentError(*problems)


def create(ray: Any, member: Member) -> Any:
    """Start the actor of a member; raises ValueError if there is one of its name."""
    options: dict[str, Any] = {
        "name": member.actor_name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": _CALLS,
        "num_cpus": 0,
        "num_gpus": member.gpus,
        # A resource and not the node's id: a node that comes back has another id, and Ray gives up on an actor whose
        # node is gone for good. So the actor waits until a node offers the resource again.
        "resources": {member.resource: member.amount},
    }
    return ray.remote(Supervisor).options(**options).remote(member)


def find(ray: Any, actor_name: str) -> Any | None:
    """Return the actor of this name, or None."""
    try:
        return ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(ray: Any, actors: Sequence[Any], method: str, timeout_s: float = ANSWER_S) -> list[Any]:
    """Call a method of all these actors at once; None for those that do not answer in time."""
    references = [getattr(actor, method).remote() for actor in actors]
    ray.wait(references, num_returns=len(references), timeout=timeout_s)
    return [_answer(ray, reference) for reference in references]


def _answer(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=0)
    except ray.exceptions.RayError:
        return None


def names(ray: Any, deployment: str) -> list[str]:
    """Return the names of a deployment's actors, those that wait for a node included."""
    actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"{deployment}/"
    return sorted(one["name"] for one in actors if one["namespace"] == NAMESPACE and one["name"].startswith(prefix))
