"""Ray's object store, the real one: run by `make test-stores`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray._private.internal_api import memory_summary  # noqa: E402 - not without Ray

from tests.client.real import real_buffer  # noqa: E402 - not without Ray
from tests.client.stores import contract, places  # noqa: E402
from tests.client.stores.clusters import cluster, killed_producer  # noqa: E402
from tests.client.stores.producer import tree  # noqa: E402
from turnout.buffer.v1 import buffer_pb2  # noqa: E402
from turnout.client import BufferClient, InvalidArgument, NotFound, Unavailable  # noqa: E402
from turnout.stores import RayStore, StoreOwner  # noqa: E402
from turnout.stores._ray_owner import PayloadOwner  # noqa: E402
from turnout.tensors import unpack  # noqa: E402

pytestmark = [
    # Ray starts processes, and what it is built with warns.
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster(num_cpus=2) as started:
        yield started


def owner() -> object:
    """The owner of the payloads on this node."""
    return ray.get_actor(f"turnout-payloads-{ray.get_runtime_context().get_node_id()}", namespace="turnout")


def held() -> int:
    count: int = ray.get(owner().count.remote())  # type: ignore[attr-defined]
    return count


def test_the_store_does_what_every_store_does(address: str) -> None:
    """Bytes of every size come back, deleted ones do not, and nothing else is given out."""
    store = RayStore()
    contract.keeps_what_it_is_given(store)
    contract.forgets_what_is_deleted(store)
    contract.gives_out_nothing_but_what_the_reference_says(store, lambda name: name + "0")
    assert held() == 0


def test_a_payload_is_read_in_place_and_outlives_its_deletion_for_its_reader(address: str) -> None:
    """Views of shared memory, which nobody can write: another reader has the same memory."""
    store = RayStore()
    ref = store.put(bytes(8 << 20))
    first, second = store.get([ref]) + store.get([ref])
    assert np.shares_memory(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8))
    assert memoryview(first).readonly
    store.delete([ref.id])
    assert bytes(first) == bytes(8 << 20)
    with pytest.raises(NotFound):
        store.get([ref])


def test_memory_is_free_again_after_a_deletion(address: str) -> None:
    """Three times the size of the object store goes through it without being spilled to disk."""
    store = RayStore()
    for _ in range(24):
        ref = store.put(bytes(50 << 20))
        store.delete([ref.id])
    assert held() == 0
    # Ray's command `ray memory --stats-only` says this.
    assert "Spilled" not in memory_summary(address, stats_only=True)


def test_only_payloads_are_accepted_from_the_owner(address: str) -> None:
    """An object of another kind under a key would be unpickled into whatever it wants to be."""
    store = RayStore()
    ref = store.put(b"a payload")
    node, key = ref.id.split("/")
    ray.get(owner().put.remote("f" * 32, np.zeros((2, 2))))  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="BAD_PAYLOAD_ID"):
        store.get([buffer_pb2.PayloadRef(id=f"{node}/{'f' * 32}", store="ray", size=4)])
    store.delete([f"{node}/{'f' * 32}", f"{node}/{key}"])


def test_what_was_on_a_node_that_is_gone_is_missing_and_deleted(address: str) -> None:
    """A lost node must not stop the owner from letting go of the rest."""
    store = RayStore()
    gone = f"{'0' * 56}/{'0' * 32}"
    with pytest.raises(NotFound):
        store.get([buffer_pb2.PayloadRef(id=gone, store="ray", size=1)])
    store.delete([gone])


async def test_a_dead_producer_loses_nothing_and_released_payloads_are_deleted(address: str) -> None:
    """The worker is killed right after its group was finished; the trainer comes later."""
    async with real_buffer() as host:

        def use() -> None:
            with BufferClient(host.target) as client:
                places.create(client)
                killed_producer(address, "ray", host.target, "first", "second")
                store = RayStore()
                lease_id, refs = places.sample(client, 2)
                assert {ref.store for ref in refs} == {"ray"}
                data = store.get(refs)
                assert [bytes(data[1]), bytes(data[3])] == [b"first", b"second"]
                for packed, name in ((data[0], "first"), (data[2], "second")):
                    assert np.array_equal(unpack(packed, "numpy")["tokens"], tree(name)["tokens"])
                assert held() == 4
                deleter = StoreOwner(host.target, places.RUN, store)
                deleter.start()
                places.release(client, lease_id)
                places.until(lambda: held() == 0)
                deleter.stop()
                with pytest.raises(NotFound):
                    store.get(refs[:1])

        await asyncio.to_thread(use)


def test_a_new_owner_takes_the_place_of_one_that_died(address: str) -> None:
    """What it held is lost and said to be; puts go on."""
    store = RayStore()
    lost = store.put(b"lost")
    ray.kill(owner())
    with pytest.raises((NotFound, Unavailable)):
        store.get([lost])

    def again() -> bool:
        try:
            store.delete([store.put(b"again").id])
        except Unavailable:
            return False
        return True

    places.until(again)
    with pytest.raises(NotFound):
        store.get([lost])


def test_without_a_cluster_the_store_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a cluster of its own would lose everything without a word."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    store = RayStore("127.0.0.1:1")

    def refuse(**how: object) -> None:
        assert how["address"] == "127.0.0.1:1"
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(Unavailable, match="STORE_UNAVAILABLE"):
        store.put(b"bytes")


def test_the_owner_holds_what_it_made_itself(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that only the producer made goes with the producer; this is why the owner puts a copy."""
    monkeypatch.setattr(ray, "put", lambda data: f"object of {data}")
    keeper = PayloadOwner()
    keeper.put("k", "data")
    assert (keeper.find(["k", "x"]), keeper.count()) == (["object of data", None], 1)
    keeper.delete(["k", "x"])
    assert keeper.count() == 0
