"""Three services with tokens and something in them, and what can be read of their state.

Invariant: what is read leaves out times, which change by themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from google.protobuf.message import Message

from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.runtime.permissions import Role
from tests.fuzz.messages import RUN
from tests.security.houses import Tokens
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AsyncBufferClient,
    AsyncEngineClient,
    AsyncSchedulerClient,
    ClientOptions,
    NotFound,
    Security,
    duration,
)
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

SERVICES: Final = ("buffer", "engine", "scheduler")
_DAY: Final = 86_400.0
_MOVING: Final = ("google.protobuf.Duration", "google.protobuf.Timestamp")
_GROUPS: Final = 5


@dataclass
class Scene:
    """The services as processes, and an operator's clients."""

    children: dict[str, Child]
    tokens: Tokens
    buffer: AsyncBufferClient
    engine: AsyncEngineClient
    scheduler: AsyncSchedulerClient
    said: list[str] = field(default_factory=list)
    """What the services wrote to stderr."""
    unlocked: bool = False
    """Whether the services ask for no token."""

    def target(self, service: str) -> str:
        """Where a service listens."""
        return self.children[service].target

    async def fill(self) -> None:
        """Put a run with groups, results and a replica in, as far as it is not there."""
        leases = buffer_pb2.LeaseTimes(claim=duration(_DAY), sample=duration(_DAY), payload=duration(_DAY))
        partitions = [buffer_pb2.PartitionConfig(name="train", default_group_size=1)]
        config = buffer_pb2.RunConfig(partitions=partitions, lease_times=leases)
        try:
            await self.buffer.calls.GetRun(buffer_pb2.GetRunRequest(run_id=RUN))
        except NotFound:
            await self.buffer.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=RUN, config=config))
            groups = [
                buffer_pb2.GroupSpec(group_id=f"g{number}", prompt=buffer_pb2.Payload(inline=b"prompt"))
                for number in range(_GROUPS)
            ]
            place: dict[str, Any] = {"run_id": RUN, "partition": "train"}
            await self.buffer.calls.AddGroups(buffer_pb2.AddGroupsRequest(**place, step=0, groups=groups))
            claiming = buffer_pb2.ClaimGroupsRequest(**place, worker_id="worker", max_trajectories=2)
            claims = (await self.buffer.calls.ClaimGroups(claiming)).claims
            results = [
                buffer_pb2.TrajectoryResult(
                    token=claim.token,
                    group_id=claim.group_id,
                    outputs=[buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1)])],
                )
                for claim in claims[:1]
            ]
            await self.buffer.calls.FinishTrajectories(buffer_pb2.FinishTrajectoriesRequest(**place, results=results))
        replicas = await self.engine.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN))
        if not any(replica.spec.replica_id == "r0" for replica in replicas.replicas):
            spec = engine_pb2.ReplicaSpec(
                replica_id="r0",
                role=engine_pb2.REPLICA_ROLE_STANDALONE,
                gpus=[engine_pb2.Gpu(node="n0", uuid="GPU-0")],
                backend="reference",
            )
            await self.engine.calls.Register(engine_pb2.RegisterRequest(run_id=RUN, spec=spec))

    async def open_run(self) -> None:
        """Open the run at the scheduler."""
        await self.scheduler.calls.OpenRun(
            scheduler_pb2.OpenRunRequest(
                run_id=RUN,
                config=scheduler_pb2.RunConfig(
                    train_batch_size=4,
                    parameter_sync_step=1,
                    mini_batch_size=4,
                    total_training_steps=10,
                    standalone_gpus=1,
                    num_warmup_batches=1,
                    group_size=1,
                    trainer_lease=duration(_DAY),
                ),
                buffer_target=self.target("buffer"),
                engine_target=self.target("engine"),
            )
        )

    async def state(self) -> dict[str, bytes]:
        """What the services hold, by what it is."""
        place: dict[str, Any] = {"run_id": RUN, "partition": "train"}
        answers: dict[str, Message] = {
            "runs of the buffer": await self.buffer.calls.ListRuns(buffer_pb2.ListRunsRequest()),
            "replicas": await self.engine.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN)),
            "runs of the scheduler": await self.scheduler.calls.ListRuns(scheduler_pb2.ListRunsRequest()),
        }
        about_run: tuple[tuple[str, Callable[[Any], Awaitable[Message]], Message], ...] = (
            ("groups", self.buffer.calls.ListGroups, buffer_pb2.ListGroupsRequest(**place)),
            ("ledger", self.buffer.calls.GetLedger, buffer_pb2.GetLedgerRequest(**place)),
            ("depth", self.buffer.calls.GetSampleableCount, buffer_pb2.GetSampleableCountRequest(**place)),
        )
        for name, call, request in about_run:
            try:
                answers[name] = await call(request)
            except NotFound:
                # An operator's call may have deleted the run.
                continue
        for answer in answers.values():
            _without_times(answer)
        for run in cast(scheduler_pb2.ListRunsResponse, answers["runs of the scheduler"]).runs:
            # It counts readings of the engines too, which come by themselves.
            run.ClearField("last_sequence")
        return {name: answer.SerializeToString(deterministic=True) for name, answer in answers.items()}


def _without_times(message: Message) -> None:
    for described, value in message.ListFields():
        if described.message_type is None or described.message_type.GetOptions().map_entry:
            continue
        if described.message_type.full_name in _MOVING:
            message.ClearField(described.name)
        else:
            for inner in value if described.is_repeated else [value]:
                _without_times(inner)


@asynccontextmanager
async def scene(directory: Path, *, unlocked: bool = False) -> AsyncIterator[Scene]:
    """Start the services, and fill them; `unlocked` ones ask for no token."""
    tokens = Tokens(directory / "tokens.yaml", RUN)
    held = directory / "service.token"
    held.write_text(tokens.all(Role.SERVICE))
    common = ["--listen", "127.0.0.1:0", "--log-level", "warning"]
    if not unlocked:
        # An attack that is slowed down finds less.
        common += ["--tokens-file", str(tokens.write()), "--token-calls-per-s", "1000000"]
    calling = ("--peer-token-file", str(held), "--peer-timeout-s", "2")
    more = {"buffer": (), "engine": ("--run", RUN, *calling[:2]), "scheduler": calling}
    said: list[str] = []
    async with Fleet(grace_s=10) as fleet:
        specs = [
            ChildSpec(
                name,
                "services.cli.main",
                (name, "serve", *common, *more[name], "--data-dir", str(directory / "data" / name)),
            )
            for name in SERVICES
        ]
        children = await fleet.start_all(*specs, on_error_line=said.append)
        options = ClientOptions(security=Security(token=tokens.all(Role.OPERATOR)))
        by_name = {child.spec.name: child for child in children}
        async with (
            AsyncBufferClient(by_name["buffer"].target, options) as buffer,
            AsyncEngineClient(by_name["engine"].target, options) as engine,
            AsyncSchedulerClient(by_name["scheduler"].target, options) as scheduler,
        ):
            made = Scene(by_name, tokens, buffer, engine, scheduler, said, unlocked)
            await made.fill()
            await made.open_run()
            yield made
