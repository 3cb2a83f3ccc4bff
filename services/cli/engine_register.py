"""`turnout engine register`: makes replicas known to a run's engine controller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import click

from services.cli.examples import with_examples
from services.cli.failures import CommandFailed
from services.cli.running import run_async
from services.cli.targets import ENGINE, security_options, target_option
from services.engine.settings import OwnReplica, parse_replica
from services.engine.wire.enums import ROLES
from services.processes.registering import NoGpus, register, register_agent
from turnout.client import AsyncEngineClient, TurnoutError
from turnout.engine.v1 import engine_pb2


@click.command(
    "register",
    help=with_examples(
        "Make replicas known to the engine controller of a run: all replicas of agents, or one engine that has none. "
        "Each is probed at once, and watched from then on. Repeating it is fine. GPUs are named as nvidia-smi -L names "
        "them; a hybrid replica's are those that it shares with the trainer.",
        "turnout engine register my-run --agent rollout-0:50054",
        "turnout engine register my-run --agent trainer-0:50054 --gpu hybrid-0=trainer-0/GPU-5f1c",
        "turnout engine register my-run --replica r0:standalone --backend vllm-http --endpoint http://rollout-0:8000",
    ),
)
@click.argument("run_id", metavar="RUN")
@target_option("engine", ENGINE)
@click.option("--agent", metavar="TARGET", multiple=True, help="Agent with replicas, as the controller reaches it.")
@click.option("--replica", metavar="ID:ROLE", help="One replica (hybrid or standalone) of an engine without an agent.")
@click.option("--backend", help="With --replica: what speaks to the engine, such as vllm-http or sglang-http.")
@click.option("--endpoint", default="", help="With --replica: where the engine is.")
@click.option(
    "--weight-version", type=int, help="With --replica: version of its loaded weights. Unset: it has none yet."
)
@click.option("--option", metavar="NAME=VALUE", multiple=True, help="With --replica: an option of the backend.")
@click.option("--gpu", metavar="ID=NODE/UUID", multiple=True, help="A GPU of a replica; once for each.")
@security_options
def engine_register(
    run_id: str,
    engine: str,
    agent: Sequence[str],
    replica: str | None,
    backend: str | None,
    endpoint: str,
    weight_version: int | None,
    option: Sequence[str],
    gpu: Sequence[str],
) -> None:
    """Register replicas."""
    if bool(agent) == bool(replica):
        raise click.UsageError("name agents with --agent, or one engine with --replica")
    gpus = _gpus(gpu)
    own = None if replica is None else _replica(replica)

    async def run() -> list[engine_pb2.Replica]:
        async with AsyncEngineClient(engine) as client:
            if own is None:
                return [one for target in agent for one in await register_agent(client, target, run_id, gpus)]
            if not backend:
                raise click.UsageError("--replica needs --backend")
            spec = engine_pb2.ReplicaSpec(
                replica_id=own.replica_id,
                role=ROLES.write(own.role),
                gpus=gpus.get(own.replica_id, ()),
                backend=backend,
                endpoint=endpoint,
                weights=engine_pb2.WEIGHTS_ORIGIN_NONE if weight_version is None else engine_pb2.WEIGHTS_ORIGIN_LOADED,
                weight_version=weight_version,
                options=dict(_pair(text, "--option", "NAME=VALUE") for text in option),
            )
            return [await register(client, run_id, spec)]

    try:
        for one in run_async(run()):
            route = engine_pb2.RouteState.Name(one.route).removeprefix("ROUTE_STATE_").lower()
            click.echo(f"{one.spec.replica_id}  {route}{'  ' + one.reason if one.reason else ''}")
    except (NoGpus, TurnoutError) as error:
        raise CommandFailed(str(error)) from error


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found):
        raise click.UsageError(f"{option} {text}: it is {form}")
    return name, value


def _gpus(texts: Sequence[str]) -> dict[str, list[engine_pb2.Gpu]]:
    gpus: dict[str, list[engine_pb2.Gpu]] = defaultdict(list)
    for text in texts:
        replica_id, device = _pair(text, "--gpu", "ID=NODE/UUID")
        node, found, uuid = device.partition("/")
        if not (node and found and uuid):
            raise click.UsageError(f"--gpu {text}: it is ID=NODE/UUID")
        gpus[replica_id].append(engine_pb2.Gpu(node=node, uuid=uuid))
    return gpus


def _replica(text: str) -> OwnReplica:
    try:
        return parse_replica(text)
    except ValueError as error:
        raise click.UsageError(f"--replica: {error}") from error
