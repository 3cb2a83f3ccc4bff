"""Stores that need nothing but Python packages, and how stores are chosen."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.client.real import real_buffer
from tests.client.stores import contract, places
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    BufferClient,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from turnout.client._payloads import Bytes
from turnout.stores import EmbeddedStore, PayloadStore, Stores, UriStore, open_store


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> UriStore:
    return UriStore(f"file://{tmp_path}/payloads" if request.param == "file" else f"memory://{uuid.uuid4().hex}")


def test_a_store_keeps_what_it_is_given(store: UriStore) -> None:
    """Whatever the buffer is told of must be there."""
    assert isinstance(store, PayloadStore)
    contract.keeps_what_it_is_given(store)


def test_a_store_forgets_what_is_deleted(store: UriStore) -> None:
    """Releases come at least once, so they come twice."""
    contract.forgets_what_is_deleted(store)


def test_a_store_gives_out_nothing_but_what_the_reference_says(store: UriStore) -> None:
    """A trainer that trains on other bytes notices nothing."""
    contract.gives_out_nothing_but_what_the_reference_says(store, lambda name: name + "/../x")


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    """The store object is no part of the reference."""
    ref = UriStore(f"file://{tmp_path}/p").put(b"bytes")
    assert bytes(UriStore(f"file://{tmp_path}/p/").get([ref])[0]) == b"bytes"
    assert UriStore(f"file://{tmp_path}/p").root == f"file://{tmp_path}/p"


@pytest.mark.parametrize(
    "payload_id",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "{root}",
        "{root}/",
        "{root}/../secret",
        "{root}/a/../../secret",
        "{root}/./x",
        "{root}//x",
        "{root}/.hidden",
        "{root}/*",
        "{root}/a[b]",
        "{root}/x::file:///etc/passwd",
        "{root}/a\nb",
        "{root}x/y",
        "http://169.254.169.254/latest",
    ],
)
def test_a_reference_reaches_nothing_outside_of_the_store(tmp_path: Path, payload_id: str) -> None:
    """References come from whoever may call the buffer; the trainer reads and deletes what they name."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    store = UriStore(f"file://{tmp_path}/root")
    named = payload_id.format(root=store.root)
    with pytest.raises(InvalidArgument, match="BAD_PAYLOAD_ID"):
        store.get([buffer_pb2.PayloadRef(id=named, store="uri", size=1)])
    with pytest.raises(InvalidArgument, match="BAD_PAYLOAD_ID"):
        store.delete([named])
    assert secret.exists()


def test_a_file_that_was_cut_or_changed_is_noticed(tmp_path: Path) -> None:
    """A shared file system loses the tail of a file when its writer dies."""
    store = UriStore(f"file://{tmp_path}")
    ref = store.put(b"0123456789")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    for spoilt in (b"", b"01234", b"0123456780", b"0123456789more"):
        file.write_bytes(spoilt)
        with pytest.raises(DataLoss):
            store.get([ref])


def test_a_full_or_missing_disk_is_told_apart_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker waits for a store that is away, and an operator has to make room in a full one."""
    store = UriStore(f"file://{tmp_path}")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("turnout.stores._uri.os.fsync", full)
    with pytest.raises(ResourceExhausted, match="STORE_FULL"):
        store.put(b"bytes")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="STORE_UNAVAILABLE"):
        UriStore(f"file://{tmp_path}/file/below").put(b"bytes")


async def test_the_buffers_own_store_has_the_same_shape() -> None:
    """Code that takes a store takes this one."""
    async with real_buffer() as host:

        def use() -> None:
            with BufferClient(host.target) as client:
                places.create(client)
                store = EmbeddedStore(client, places.RUN)
                assert isinstance(store, PayloadStore)
                refs = [store.put([b"large", bytes(2 << 20)]), store.put(b"small")]
                assert {ref.store for ref in refs} == {""}
                places.finish(client, "g", refs)
                lease_id, told = places.sample(client)
                got = EmbeddedStore(client, places.RUN, lease_id=lease_id).get(told)
                assert [len(data) for data in got] == [5 + (2 << 20), 5]

        await asyncio.to_thread(use)


def test_a_store_is_chosen_by_what_is_written_down(tmp_path: Path) -> None:
    """One argument, in a configuration file too."""
    opened = open_store(f"file://{tmp_path}")
    assert isinstance(opened, UriStore)
    assert open_store(opened) is opened


@pytest.mark.parametrize(
    ("spec", "reason", "said"),
    [
        ("redis", "UNKNOWN_STORE", "'ray', 'transferqueue', a URI"),
        ("", "UNKNOWN_STORE", "'ray'"),
        ("nonsense://bucket", "UNKNOWN_SCHEME", "nonsense"),
        ("s3://bucket/payloads", "EXTRA_MISSING", "s3fs"),
        ("ray", "EXTRA_MISSING", "turnout[ray]"),
        ("transferqueue", "EXTRA_MISSING", "turnout[transferqueue]"),
    ],
)
def test_a_store_that_cannot_be_opened_says_what_to_install(spec: str, reason: str, said: str) -> None:
    """At the start of a worker, and not after its first trajectory."""
    module = {"s3://bucket/payloads": "s3fs", "ray": "ray", "transferqueue": "transfer_queue"}.get(spec)
    if module and importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(FailedPrecondition, match=reason) as caught:
        open_store(spec)
    assert said in caught.value.message


def test_without_fsspec_a_uri_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra too."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(FailedPrecondition, match=r"turnout\[uri\]"):
        open_store("file:///tmp/payloads")


class Shelf:
    """A store of one's own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[str, bytes] = {}
        self.closed = False

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        raise NotImplementedError

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        return [self.kept[ref.id] for ref in refs]

    def delete(self, ids: Sequence[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


def test_references_are_resolved_by_the_store_they_name(tmp_path: Path) -> None:
    """A batch mixes what several kinds of workers produced."""
    files, shelf = UriStore(f"file://{tmp_path}"), Shelf("shelf")
    shelf.kept = {"a": b"first", "b": b"third"}
    stores = Stores([files, shelf])
    refs = [
        buffer_pb2.PayloadRef(id="a", store="shelf"),
        files.put(b"second"),
        buffer_pb2.PayloadRef(id="b", store="shelf"),
    ]
    assert stores.get(refs) == [b"first", b"second", b"third"]
    assert stores.get([]) == []
    stores.close()
    assert shelf.closed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ray", "turnout[ray]"),
        ("transferqueue", "turnout[transferqueue]"),
        ("uri", "turnout[uri]"),
        ("x", "PayloadStore"),
    ],
)
def test_an_unknown_store_in_a_reference_says_what_to_configure(name: str, said: str) -> None:
    """The trainer finds out by a batch that names it."""
    with pytest.raises(FailedPrecondition, match="UNKNOWN_STORE") as caught:
        Stores().get([buffer_pb2.PayloadRef(id="k", store=name)])
    assert said in caught.value.message


def test_two_stores_of_one_name_are_refused(tmp_path: Path) -> None:
    """Which of them a reference means could not be told."""
    with pytest.raises(ValueError, match="uri"):
        Stores([f"file://{tmp_path}/a", f"file://{tmp_path}/b"])


def test_nothing_is_there_under_an_id_of_the_right_form(store: UriStore) -> None:
    """A reference that outlived its payload."""
    with pytest.raises(NotFound):
        store.get([buffer_pb2.PayloadRef(id=f"{store.root}/ab/{'0' * 32}", store="uri", size=1)])
