"""The client against the real services: a whole small training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.runtime.permissions import Role
from tests.client.real import House, Locks, house
from tests.runtime.certificates import Authority
from tests.security.houses import Tokens
from turnout.buffer.v1 import buffer_pb2
from turnout.client import INLINE_BYTES, AsyncEngineClient, ClientOptions, PartialFailure, Security
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import Moved, TrainerHooks, TrainerSetup, WeightTarget
from turnout.trainer._weights import WeightUpdates
from turnout.worker import RolloutWorker, WorkerSetup, pack, unpack

STEPS, MINI_BATCHES, MINI_BATCH, GROUP = 3, 2, 2, 2
WEIGHTS = bytes(1 << 20)


def setup(place: House, stores: Sequence[str] = ()) -> TrainerSetup:
    return TrainerSetup(
        run_id="r1",
        stores=stores,
        config=scheduler_pb2.RunConfig(
            switch=scheduler_pb2.SwitchConfig(enable_switch=True),
            train_batch_size=MINI_BATCHES * MINI_BATCH,
            parameter_sync_step=MINI_BATCHES,
            mini_batch_size=MINI_BATCH,
            total_training_steps=STEPS,
            hybrid_gpus=2,
            standalone_gpus=2,
            num_warmup_batches=1,
            group_size=GROUP,
        ),
        scheduler=place.scheduler.target,
        buffer=place.buffer.target,
        engine=place.engine.target,
        buffer_config=buffer_pb2.RunConfig(
            partitions=[buffer_pb2.PartitionConfig(name="train", default_group_size=GROUP)]
        ),
        options=place.options(Role.TRAINER),
    )


def locks(directory: Path) -> Locks:
    """Mutual TLS and tokens: each role of the job with the least that it needs."""
    authority, tokens = Authority(directory / "tls"), Tokens(directory / "tokens.yaml", "r1")
    cert, key = authority.issue("service", "127.0.0.1")
    held = directory / "service.token"
    held.write_text(tokens.of(Role.SERVICE))
    client = authority.issue("client", "client")
    return Locks(
        {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca, "tokens_file": tokens.write()},
        {"peer_ca": str(authority.ca), "peer_cert": cert, "peer_key": key, "peer_token_file": held},
        lambda role: ClientOptions(
            security=Security(ca=authority.ca, cert=client[0], key=client[1], token=tokens.of(role))
        ),
    )


def prompts(first: int, count: int) -> list[buffer_pb2.GroupSpec]:
    data, content_type = pack([1, 2, 3])
    return [
        buffer_pb2.GroupSpec(group_id=f"g{number}", prompt=buffer_pb2.Payload(inline=data, content_type=content_type))
        for number in range(first, first + count)
    ]


def train(
    place: House, loop: asyncio.AbstractEventLoop, stores: Sequence[str] = ()
) -> tuple[list[str], list[events_pb2.Mode.ValueType]]:
    """A trainer with one thread; returns the groups it trained on and the mode after each step."""
    trained: list[str] = []
    modes: list[events_pb2.Mode.ValueType] = []
    next_prompt = 0
    with TrainerHooks.open(setup(place, stores)) as hooks:

        def update_weights(target: WeightTarget) -> None:
            hooks.move_bytes(target, WEIGHTS)

        asyncio.run_coroutine_threadsafe(place.register("r1", hooks.epoch), loop).result(30)
        hooks.on_init_end(update_weights)
        assert hooks.mode == events_pb2.MODE_ROLLOUT
        next_prompt += hooks.on_train_begin(prompts(next_prompt, hooks.warmup_groups))
        for step in range(hooks.next_step, STEPS + 1):
            hooks.on_step_begin(step)
            next_prompt += hooks.add_groups(step, prompts(next_prompt, MINI_BATCHES * MINI_BATCH))
            hooks.prepare_step(step)
            assert hooks.mode == events_pb2.MODE_TRAINER
            for mini_batch in range(MINI_BATCHES):
                hooks.on_sample_begin(step, mini_batch)
                batch = hooks.sample(step, mini_batch, MINI_BATCH)
                assert hooks.on_sample_end(step, mini_batch, tokens=batch.tokens) >= 0
                for output, payload in zip(batch.outputs, batch.payloads(), strict=True):
                    token_ids, _ = unpack(payload, output.payload.content_type)
                    assert len(token_ids) == sum(segment.tokens for segment in output.segments) > 0
                    assert output.rewards == {"reward": 1.0}
                trained += [group.group_id for group in batch.groups]
                batch.commit()
            metrics = hooks.on_step_end(step, update_weights)
            assert "separate_async/decision/should_switch_to_rollout" in metrics
            modes.append(hooks.mode)
    return trained, modes


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("store", "locked"), [(None, False), ("file", False), ("file", True)])
async def test_a_small_training_runs_end_to_end(store: str | None, locked: bool, tmp_path: Path) -> None:
    """What each part believes of the others' contract is only tested by the parts together.

    So it is with what each may do: behind mutual TLS and tokens, a role that lacks one call stops the training.
    """
    payloads = tmp_path / "payloads"
    payloads.mkdir()
    root = None if store is None else f"file://{payloads}"
    async with house(locks(tmp_path) if locked else None) as place:
        worker = RolloutWorker(
            WorkerSetup(
                "r1",
                place.buffer.target,
                place.engine.target,
                concurrency=8,
                max_tokens=400,
                store=root,
                inline_bytes=INLINE_BYTES if root is None else 0,
                options=place.options(Role.WORKER),
            ),
            reward_fn=lambda job, generation: {"reward": 1.0},
        )
        working = asyncio.create_task(worker.run())
        stores = [] if root is None else [root]
        trained, modes = await asyncio.to_thread(train, place, asyncio.get_running_loop(), stores)
        worker.stop()
        stats = await working
    assert len(trained) == len(set(trained)) == STEPS * MINI_BATCHES * MINI_BATCH
    assert modes[-1] == events_pb2.MODE_TRAINER
    assert stats.finished >= len(trained) * GROUP
    assert stats.failed == stats.lost == 0
    # What was trained on is deleted, but for what the end of the trainer left to the next.
    left = await asyncio.to_thread(lambda: sum(path.is_file() for path in payloads.rglob("*")))
    assert left < stats.finished


@pytest.mark.parametrize("staggered", [False, True])
async def test_a_replica_that_did_not_take_the_weights_holds_up_no_other_and_no_later_update(staggered: bool) -> None:
    """A transaction left open by one broken replica would keep later waves on old weights, and refuse every update."""
    async with house() as place, AsyncEngineClient(place.engine.target) as engine:
        await engine.calls.OpenEpoch(engine_pb2.OpenEpochRequest(run_id="r1", epoch=1))
        await place.register("r1", 1)
        weights = WeightUpdates(engine, run_id="r1", epoch=1, staggered=staggered, in_flight=engine_pb2.IN_FLIGHT_ABORT)

        async def install(version: int, *broken: str) -> list[str]:
            async def move(target: WeightTarget) -> Moved:
                await weights.move_bytes(target, WEIGHTS)
                return Moved(failed=broken)

            role = engine_pb2.REPLICA_ROLE_STANDALONE
            return (await weights.install(move, role=role, version=version)).failed

        async def versions() -> list[int]:
            replicas = (await engine.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id="r1"))).replicas
            return [r.weight_version for r in replicas if r.spec.replica_id in ("s0", "s1")]

        assert await install(1) == []
        assert await install(2, "s0") == ["s0"]
        assert (await versions())[1] == 2
        assert await install(3, "s1") == ["s1"]
        assert (await versions())[0] == 3
        with pytest.raises(PartialFailure):
            await install(4, "s0", "s1")
        assert await install(5) == []
        assert await versions() == [5, 5]
