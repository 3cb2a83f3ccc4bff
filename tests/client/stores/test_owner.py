"""From a worker's payload to its deletion: the worker, the buffer, the trainer and the owner of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.buffer.service import build
from services.buffer.settings import BufferSettings
from tests.client.real import real_buffer
from tests.client.stores import places
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, BufferClient, ClientOptions, FailedPrecondition, RetryPolicy, duration
from turnout.client._payloads import Bytes
from turnout.stores import StoreOwner, Stores, UriStore
from turnout.stores._protocol import full, unavailable
from turnout.trainer import AsyncBatch
from turnout.worker import Job, RolloutWorker, WorkerSetup

QUICK = ClientOptions(retry=RetryPolicy(initial=0.01, maximum=0.05))


def files(directory: Path) -> int:
    return sum(path.is_file() for path in directory.rglob("*"))


async def test_a_worker_writes_a_trainer_reads_and_the_owner_deletes(tmp_path: Path) -> None:
    """One argument on either side moves the bytes out of the buffer."""
    root = f"file://{tmp_path}/payloads"
    async with real_buffer() as host, AsyncBufferClient(host.target, QUICK) as client:
        await asyncio.to_thread(lambda: places.create(BufferClient(host.target, QUICK)))
        prompt = UriStore(root).put(b"a long prompt")
        groups = [buffer_pb2.GroupSpec(group_id=f"g{n}", prompt=buffer_pb2.Payload(ref=prompt)) for n in range(3)]
        await client.calls.AddGroups(
            buffer_pb2.AddGroupsRequest(run_id=places.RUN, partition="train", step=1, groups=groups)
        )

        async def generate(job: Job) -> buffer_pb2.Output:
            data = job.prompt + job.group_id.encode()
            payload = await worker.payload([data, b"!"] if job.group_id != "g0" else b"", "text/plain")
            return buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1)], payload=payload)

        setup = WorkerSetup(places.RUN, host.target, store=root, inline_bytes=0, options=QUICK)
        worker = RolloutWorker(setup, generate_fn=generate)
        working = asyncio.create_task(worker.run())
        request = buffer_pb2.SampleRequest(run_id=places.RUN, partition="train", step=1, batch=3, max_wait=duration(20))
        sampled = await client.sample(request)
        worker.stop()
        await working
        stores = Stores([root])
        how = {"run_id": places.RUN, "epoch": 0}
        batch = AsyncBatch(client, sampled, stores, **how, on_release=lambda: None)  # type: ignore[arg-type]
        read = [bytes(data) for data in await batch.payloads()]
        assert read == [b"", b"a long promptg1!", b"a long promptg2!"]
        assert {output.payload.ref.store for output in batch.outputs} == {"", "uri"}
        with pytest.raises(FailedPrecondition, match=r"turnout\[uri\]"):
            await AsyncBatch(client, sampled, Stores(), **how, on_release=lambda: None).payloads()  # type: ignore[arg-type]
        owners = [StoreOwner(host.target, places.RUN, store, QUICK) for store in stores]
        for owner in owners:
            owner.start()
        assert files(tmp_path) == 3
        await batch.commit()
        await asyncio.to_thread(places.until, lambda: files(tmp_path) == 0)
        for owner in owners:
            await asyncio.to_thread(owner.stop)


class Faulty:
    """A store that refuses to delete at first."""

    def __init__(self, store: UriStore, failures: int) -> None:
        self._store = store
        self.failures = failures
        self.name = store.name
        self.asked: list[list[str]] = []

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        return self._store.put(data)

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        return self._store.get(refs)

    def delete(self, ids: Sequence[str]) -> None:
        self.asked.append(list(ids))
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the store is away")
        self._store.delete(ids)

    def close(self) -> None:
        self._store.close()


class Away(Faulty):
    """A store that cannot be reached at first."""

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        if self.failures:
            self.failures -= 1
            raise (full if self.failures else unavailable)(self.name, "later")
        return super().put(data)


async def test_a_worker_waits_for_a_store_that_is_away_or_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of generation must not be thrown away for a store that is back in seconds."""
    monkeypatch.setattr("turnout.worker._payloads._PAUSE_S", 0.01)
    store = Away(UriStore(f"file://{tmp_path}"), failures=3)
    async with real_buffer() as host, AsyncBufferClient(host.target, QUICK) as client:
        await asyncio.to_thread(lambda: places.create(BufferClient(host.target, QUICK)))
        group = buffer_pb2.GroupSpec(group_id="g")
        await client.calls.AddGroups(
            buffer_pb2.AddGroupsRequest(run_id=places.RUN, partition="train", step=1, groups=[group])
        )
        generated: list[str] = []

        async def generate(job: Job) -> buffer_pb2.Output:
            generated.append(job.group_id)
            payload = await worker.payload(b"bytes")
            return buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1)], payload=payload)

        worker = RolloutWorker(
            WorkerSetup(places.RUN, host.target, store=store, inline_bytes=0, options=QUICK), generate_fn=generate
        )
        working = asyncio.create_task(worker.run())
        request = buffer_pb2.SampleRequest(run_id=places.RUN, partition="train", step=1, batch=1, max_wait=duration(20))
        sampled = await client.sample(request)
        worker.stop()
        stats = await working
    assert (generated, stats.finished, stats.failed) == (["g"], 1, 0)
    assert sampled.groups[0].trajectories[0].outputs[0].payload.ref.store == "uri"


async def test_what_could_not_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away for a minute must not keep the bytes for ever."""
    monkeypatch.setattr("turnout.stores._owner._FIRST_PAUSE_S", 0.01)
    async with real_buffer() as host:

        def use() -> None:
            store = Faulty(UriStore(f"file://{tmp_path}"), failures=2)
            with BufferClient(host.target, QUICK) as client:
                places.create(client)
                ref = store.put(b"bytes")
                places.finish(client, "g", [ref])
                lease_id, _ = places.sample(client)
                owner = StoreOwner(host.target, places.RUN, store, QUICK)
                owner.start()
                places.release(client, lease_id)
                places.until(lambda: files(tmp_path) == 0)
                assert store.asked == [[ref.id]] * 3
                client.calls.DeleteRun(buffer_pb2.DeleteRunRequest(run_id=places.RUN))
                assert owner.join(20)
                assert owner.deleted == 1
                owner.stop()

        await asyncio.to_thread(use)


async def test_an_owner_goes_on_after_restarts_of_the_buffer_and_of_itself(tmp_path: Path) -> None:
    """Neither side remembers for the other: what is not acknowledged comes again, what is comes no more."""
    store = UriStore(f"file://{tmp_path}/payloads")
    settings = BufferSettings(listen=["127.0.0.1:0"], grace_s=1.0, data_dir=tmp_path / "data")

    def first(target: str) -> None:
        with BufferClient(target, QUICK) as client:
            places.create(client)
            for name in "abc":
                places.finish(client, name, [store.put(name.encode())])
            lease_id, _ = places.sample(client, 1)
            places.release(client, lease_id)

    def second(target: str) -> None:
        owner = StoreOwner(target, places.RUN, store, QUICK)
        owner.start()
        places.until(lambda: files(tmp_path / "payloads") == 2)
        places.until(lambda: owner.deleted == 1)
        owner.stop()
        with BufferClient(target, QUICK) as client:
            lease_id, refs = places.sample(client, 1)
            assert bytes(store.get(refs)[0]) == b"b"
            places.release(client, lease_id)

    async with build(settings) as host:
        await asyncio.to_thread(first, host.target)
    async with build(settings) as host:
        await asyncio.to_thread(second, host.target)
    async with build(settings) as host:
        owner = StoreOwner(host.target, places.RUN, store, QUICK)
        owner.start()
        await asyncio.to_thread(places.until, lambda: owner.deleted == 1)
        assert files(tmp_path / "payloads") == 1
        await asyncio.to_thread(owner.stop)


async def test_an_owner_of_a_run_that_is_not_there_ends(tmp_path: Path) -> None:
    """It must not ask for ever."""
    async with real_buffer() as host:
        owner = StoreOwner(host.target, "nobody", UriStore(f"file://{tmp_path}"), QUICK)
        owner.start()
        assert await asyncio.to_thread(owner.join, 10)
        await asyncio.to_thread(owner.stop)


def test_an_owner_that_is_stopped_before_it_began_ends_in_order(tmp_path: Path) -> None:
    """Ctrl-C can come before the thread: that is no error of its own."""
    owner = StoreOwner("127.0.0.1:1", places.RUN, UriStore(f"file://{tmp_path}"), QUICK)
    owner.stop()
    assert owner.deleted == 0
