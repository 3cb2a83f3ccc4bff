"""`turnout status`: ask the three services once, and print what they say.

Invariants: a service that does not answer delays the command by seconds and is shown as such (exit code 1); the others
are asked all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import click
from rich.console import Console

from services.cli.examples import with_examples
from services.cli.failures import EXIT_FAILED
from services.cli.targets import BUFFER, ENGINE, SCHEDULER, security_options, target_option
from services.views.overview import Overview, ReplicaOverview, RunOverview, ServiceOverview, overview_table
from services.views.run_state import mode_name, route_name
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    BufferClient,
    ClientOptions,
    EngineClient,
    RetryPolicy,
    RunNotFound,
    SchedulerClient,
    Timeouts,
    TurnoutError,
    seconds,
)
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

R = TypeVar("R")

_TIMEOUTS: Final = Timeouts(call=3.0, attempt=3.0)
_RETRY: Final = RetryPolicy(max_attempts=1)
"""A person waits: one try, three seconds."""

_ROLES: Final = {
    engine_pb2.REPLICA_ROLE_HYBRID: "hybrid",
    engine_pb2.REPLICA_ROLE_STANDALONE: "standalone",
    engine_pb2.REPLICA_ROLE_COLOCATED: "colocated",
}
_HEALTH: Final = {
    engine_pb2.REPLICA_HEALTH_HEALTHY: "healthy",
    engine_pb2.REPLICA_HEALTH_UNRESPONSIVE: "unresponsive",
    engine_pb2.REPLICA_HEALTH_DEAD: "dead",
}


@click.command(
    help=with_examples(
        "Show the three services, their runs with mode, step and depth, and the replicas. Exit code 1 if a service "
        "does not answer.",
        "turnout status",
        "turnout status --scheduler 10.0.0.5:50053 --json",
        "turnout status --run my-run --token-file reader.token",
    )
)
@target_option("buffer", BUFFER)
@target_option("engine", ENGINE)
@target_option("scheduler", SCHEDULER)
@click.option(
    "--run", "run_id", metavar="RUN", help="This run alone, which is all that a token of one run may ask for."
)
@security_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(buffer: str, engine: str, scheduler: str, run_id: str | None, as_json: bool) -> None:
    """Print the overview."""
    overview = look(buffer, engine, scheduler, run_id)
    if as_json:
        click.echo(json.dumps(overview.to_dict()))
    else:
        Console(highlight=False).print(overview_table(overview))
    if not overview.reachable:
        click.get_current_context().exit(EXIT_FAILED)


def look(buffer: str, engine: str, scheduler: str, run_id: str | None = None) -> Overview:
    """Ask the services and return what they know, of all runs or of one."""
    overview = Overview()
    options = ClientOptions(timeouts=_TIMEOUTS, retry=_RETRY)
    runs: dict[str, RunOverview] = {}

    def ask(service: str, target: str, question: Callable[[], None]) -> None:
        problem = _problem(question)
        overview.services.append(ServiceOverview(service, target, problem))

    with (
        BufferClient(buffer, options) as buffers,
        EngineClient(engine, options) as engines,
        SchedulerClient(scheduler, options) as schedulers,
    ):

        def ask_scheduler() -> None:
            for run in _some(
                run_id,
                lambda: schedulers.calls.ListRuns(scheduler_pb2.ListRunsRequest()).runs,
                lambda one: schedulers.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=one)).run,
            ):
                runs[run.run_id] = _run(run)

        def ask_buffer() -> None:
            for run in _some(
                run_id,
                lambda: buffers.calls.ListRuns(buffer_pb2.ListRunsRequest()).runs,
                lambda one: buffers.calls.GetRun(buffer_pb2.GetRunRequest(run_id=one)).run,
            ):
                seen = runs.setdefault(run.run_id, RunOverview(run.run_id))
                for partition in run.config.partitions:
                    if partition.kind != buffer_pb2.PARTITION_KIND_VALIDATION:
                        _add_depth(buffers, seen, partition.name)

        def ask_engine() -> None:
            # A controller serves one run and refuses others, so any answer shows that it is there.
            for run in runs.values():
                try:
                    answer = engines.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run.run_id))
                except RunNotFound:
                    continue
                run.replicas = [_replica(replica) for replica in answer.replicas]
            if not runs:
                try:
                    engines.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run_id or "turnout-status"))
                except RunNotFound:
                    return

        ask("scheduler", scheduler, ask_scheduler)
        ask("buffer", buffer, ask_buffer)
        ask("engine", engine, ask_engine)
    overview.runs = [runs[run_id] for run_id in sorted(runs)]
    return overview


def _some(run_id: str | None, every: Callable[[], Iterable[R]], one: Callable[[str], R]) -> Iterable[R]:
    """All runs, or the one that was asked for; none if the service does not know it."""
    if run_id is None:
        return every()
    try:
        return [one(run_id)]
    except RunNotFound:
        return []


def _problem(question: Callable[[], Any]) -> str:
    try:
        question()
    except TurnoutError as error:
        return str(error) if error.from_service else f"does not answer ({error.code.name})"
    return ""


def _run(run: scheduler_pb2.Run) -> RunOverview:
    return RunOverview(
        run.run_id,
        open=run.open,
        mode=mode_name(run.mode),
        step=run.step,
        policy=run.config.policy or "off",
        switching=run.config.switch.enable_switch,
        lends=run.lends,
        reclaims=run.reclaims,
        lease_s=seconds(run.lease),
        stuck_reason=run.stuck_reason,
    )


def _add_depth(client: BufferClient, run: RunOverview, partition: str) -> None:
    request = buffer_pb2.GetSampleableCountRequest(run_id=run.run_id, partition=partition)
    depth = client.calls.GetSampleableCount(request).depth
    run.sampleable = (run.sampleable or 0) + depth.sampleable
    run.in_flight = (run.in_flight or 0) + depth.counts.pending + depth.counts.running


def _replica(replica: engine_pb2.Replica) -> ReplicaOverview:
    return ReplicaOverview(
        replica.spec.replica_id,
        _ROLES.get(replica.spec.role, "unknown"),
        route_name(replica.route),
        _HEALTH.get(replica.health, "unknown"),
        replica.running,
        replica.weight_version if replica.HasField("weight_version") else None,
    )
