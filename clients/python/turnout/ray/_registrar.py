"""Keeps the replicas of an agent registered at the run's controller.

Invariants: a controller that forgot them (it had no data directory, or a new one) is told again; an agent that came
back at another address takes the place of the one before; what the controller refuses is kept for `status` and tried
again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from turnout.channels import SecurityError
from turnout.client import ClientOptions, EngineClient, NotFound, RetryPolicy, Timeouts, TurnoutError
from turnout.engine.v1 import engine_pb2
from turnout.ray._member import Member, ReplicaName

LOOK_EVERY_S: Final = 1.0
"""Between two looks at what the controller knows: one small read."""

CALL_S: Final = 10.0
"""Wall seconds for a call; an engine has to be probed before it is registered."""

_ROLES: Final = {
    "standalone": engine_pb2.REPLICA_ROLE_STANDALONE,
    "hybrid": engine_pb2.REPLICA_ROLE_HYBRID,
}


class Registrar:
    """The task of an agent's actor.

    `target` gives the agent's own address, `find_controller` that of the controller; empty while it does not serve.
    """

    def __init__(self, member: Member, target: Callable[[], str], find_controller: Callable[[], str]) -> None:
        self._member = member
        self._target = target
        self._find_controller = find_controller
        self._stopping = threading.Event()
        # One try a look. TLS and token come from the environment, which the actor has set before.
        timeouts = Timeouts(call=CALL_S, attempt=CALL_S)
        self._options = ClientOptions(timeouts=timeouts, retry=RetryPolicy(max_attempts=1))
        self.unregistered = tuple(replica.replica_id for replica in member.replicas)
        """Replicas that the controller does not have as they are."""
        self.problem = ""
        """Why, in a sentence."""

    def stop(self) -> None:
        """End it. What is registered stays so."""
        self._stopping.set()

    def run(self) -> None:
        """Look, and register, until it is stopped."""
        controller = ""
        while not self._stopping.wait(LOOK_EVERY_S):
            endpoint = self._target()
            if not endpoint:
                continue
            controller = controller or self._find_controller()
            if not controller:
                self.problem = "the controller is not there"
                continue
            try:
                with EngineClient(controller, self._options) as client:
                    self._look(client, endpoint)
                self.problem = ""
            except (SecurityError, TurnoutError) as error:
                self.problem = str(error)
                # It may have come back elsewhere.
                controller = ""

    def _look(self, client: EngineClient, endpoint: str) -> None:
        run = self._member.run
        known = {}
        with contextlib.suppress(NotFound):
            answer = client.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run))
            known = {replica.spec.replica_id: replica.spec for replica in answer.replicas}
        self.unregistered = tuple(
            replica.replica_id
            for replica in self._member.replicas
            if replica.replica_id not in known or known[replica.replica_id].endpoint != endpoint
        )
        for replica in self._member.replicas:
            there, wanted = known.get(replica.replica_id), replica_spec(replica, endpoint)
            if there is not None and there.endpoint != endpoint:
                request = engine_pb2.DeregisterRequest(run_id=run, replica_id=replica.replica_id)
                client.calls.Deregister(request)
                there = None
            if there is None:
                client.calls.Register(engine_pb2.RegisterRequest(run_id=run, spec=wanted))
            self.unregistered = tuple(name for name in self.unregistered if name != replica.replica_id)


def replica_spec(replica: ReplicaName, endpoint: str) -> engine_pb2.ReplicaSpec:
    """Return how a replica of an agent is registered. Its weights come with the first update."""
    return engine_pb2.ReplicaSpec(
        replica_id=replica.replica_id,
        role=_ROLES[replica.role],
        gpus=[engine_pb2.Gpu(node=replica.node, uuid=gpu) for gpu in replica.gpus],
        backend="agent",
        endpoint=endpoint,
        weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
    )
