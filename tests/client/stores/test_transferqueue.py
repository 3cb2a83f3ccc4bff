"""TransferQueue, the real one: run by `make test-stores`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

transfer_queue = pytest.importorskip("transfer_queue")

from tests.client.real import real_buffer  # noqa: E402 - not without TransferQueue
from tests.client.stores import contract, places  # noqa: E402
from tests.client.stores.clusters import cluster, killed_producer  # noqa: E402
from tests.client.stores.producer import tree  # noqa: E402
from turnout.client import BufferClient, NotFound, Unavailable  # noqa: E402
from turnout.stores import StoreOwner, TransferQueueStore  # noqa: E402
from turnout.tensors import unpack  # noqa: E402

pytestmark = [
    # It starts Ray and its own actors, half a minute in all on two cores.
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # Fewer and its actors wait for each other on two cores.
    with cluster(num_cpus=8) as started:
        with pytest.raises(Unavailable, match=r"transfer_queue\.init"):
            TransferQueueStore().put(b"too early")
        transfer_queue.init()
        try:
            yield started
        finally:
            transfer_queue.close()


def keys() -> list[str]:
    return list(transfer_queue.kv_list("turnout-payloads").get("turnout-payloads", {}))


def test_the_store_does_what_every_store_does(address: str) -> None:
    """Bytes of every size come back, deleted ones do not, and nothing else is given out."""
    store = TransferQueueStore()
    contract.keeps_what_it_is_given(store)
    contract.forgets_what_is_deleted(store)
    contract.gives_out_nothing_but_what_the_reference_says(store, lambda name: name + "0")
    assert keys() == []


async def test_a_dead_producer_loses_nothing_and_released_payloads_are_deleted(address: str) -> None:
    """The worker is killed right after its group was finished; the trainer comes later."""
    async with real_buffer() as host:

        def use() -> None:
            with BufferClient(host.target) as client:
                places.create(client)
                killed_producer(address, "transferqueue", host.target, "first", "second")
                store = TransferQueueStore()
                lease_id, refs = places.sample(client, 2)
                assert {ref.store for ref in refs} == {"transferqueue"}
                data = store.get(refs)
                assert [bytes(data[1]), bytes(data[3])] == [b"first", b"second"]
                assert np.array_equal(unpack(data[0], "numpy")["tokens"], tree("first")["tokens"])
                assert sorted(keys()) == sorted(ref.id for ref in refs)
                deleter = StoreOwner(host.target, places.RUN, store)
                deleter.start()
                places.release(client, lease_id)
                places.until(lambda: keys() == [])
                deleter.stop()
                with pytest.raises(NotFound):
                    store.get(refs[:1])

        await asyncio.to_thread(use)
