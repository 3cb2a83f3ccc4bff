"""One Ray cluster with TransferQueue for the tests that need real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def queue() -> Iterator[None]:
    """A cluster with a TransferQueue, whose workers get these tests by value: verl has a package `tests` of its own."""
    import transfer_queue
    from omegaconf import OmegaConf
    from ray import cloudpickle

    from tests.client.stores.clusters import cluster
    from tests.verl import server
    from tests.verl.adapter import actors, cpu, loops

    modules = (server, actors, cpu, loops)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    with cluster(num_cpus=8):
        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        transfer_queue.close()
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)
