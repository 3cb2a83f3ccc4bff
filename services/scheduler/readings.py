"""What an engine controller says of its replicas and requests, as events of the run.

Invariant: a replica that is neither hybrid nor standalone, or that nobody knows, is told as unknown and never as one of
the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.domain import events
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from turnout.engine.v1 import engine_pb2

_POOLS = {engine_pb2.REPLICA_ROLE_HYBRID: True, engine_pb2.REPLICA_ROLE_STANDALONE: False}


def on_hybrid(replica: engine_pb2.Replica | None) -> bool | None:
    """Whether a replica is a hybrid; None if it is not known, or neither hybrid nor standalone."""
    return None if replica is None else _POOLS.get(replica.spec.role)


def requests_of(
    report: engine_pb2.ProgressReport, partition: str, turns: Turns, reports: Reports
) -> events.RequestProgress:
    """What runs of the training partition.

    Requests, each with the tokens of its trajectory's earlier turns; trajectories between two turns; and those that no
    engine ever showed, as their workers report them.
    """
    reported = [request for request in report.requests if request.join_key.partition == partition]
    turns.read(reported)
    requests = [
        events.RunningRequest(
            request.join_key.group_id,
            request.join_key.trajectory,
            turns.before(request.join_key) + request.output_tokens,
            request.replica_id,
            _POOLS.get(request.role) if request.replica_id else None,
        )
        for request in reported
    ]
    alone = [told for told in reports if not turns.knows(told[0], told[1])]
    requests += [events.RunningRequest(*told, "", None) for told in (*turns.between(), *alone)]
    return events.RequestProgress(tuple(requests), _covered_share(report, len(alone)))


def _covered_share(report: engine_pb2.ProgressReport, alone: int) -> float:
    """The share of what runs in engines that is known, with `alone` trajectories that workers tell of."""
    in_engines = sum(counters.running + counters.waiting for counters in report.replicas)
    if not in_engines:
        return report.covered_share
    return min(1.0, report.covered_share + alone / in_engines)


def counters_of(
    report: engine_pb2.ProgressReport, replicas: Mapping[str, engine_pb2.Replica]
) -> events.ReplicaCounters:
    """The counters of all replicas; `replicas` says what their routes are."""
    return events.ReplicaCounters(
        tuple(_reading(counters, replicas.get(counters.replica_id)) for counters in report.replicas)
    )


def _reading(counters: engine_pb2.ReplicaCounters, replica: engine_pb2.Replica | None) -> events.ReplicaReading:
    route = replica.route if replica is not None and replica.route else events.RouteState.OUT
    return events.ReplicaReading(
        counters.replica_id,
        _POOLS.get(counters.role),
        counters.decoded_tokens,
        counters.prefilled_tokens,
        counters.prefill_seconds,
        counters.running,
        events.RouteState(route),
        counters.delivered_tokens if counters.HasField("delivered_tokens") else None,
    )
