"""Payloads as files below one URI, through fsspec: file, S3, GCS, HDFS, ... and memory for tests.

Invariants: an id is the URI of a file below the root of the store, made of harmless names, so that a reference from the
network can neither read nor delete anything else; a file is whole before its reference exists, and never written again.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Sequence
from typing import Any, Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client._payloads import Bytes, parts_of
from turnout.stores._protocol import full, missing, reference, refused, unavailable, unusable, verified

NAME: Final = "uri"

_NAMES: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)*[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
"""Below the root: no empty name, none that begins with a dot, nothing that a file system could read as a pattern."""


class UriStore:
    """Files below `root`, for example file:///mnt/shared/payloads or s3://bucket/payloads."""

    name = NAME

    def __init__(self, root: str, **options: Any) -> None:
        """`options` go to the file system. Raises FailedPrecondition / EXTRA_MISSING, UNKNOWN_SCHEME."""
        self.root = root.rstrip("/")
        scheme = root.partition("://")[0]
        try:
            import fsspec
        except ImportError as error:
            message = f"payloads at {root} need fsspec: pip install 'turnout[uri]'"
            raise unusable(NAME, "EXTRA_MISSING", message) from error
        try:
            self._files, path = fsspec.core.url_to_fs(self.root, **options)
        except ImportError as error:
            message = f"payloads at {root} need a package that fsspec names: {error}"
            raise unusable(NAME, "EXTRA_MISSING", message) from error
        except ValueError as error:
            raise unusable(NAME, "UNKNOWN_SCHEME", f"fsspec knows no file system for {scheme}://: {error}") from error
        self._path: str = path.rstrip("/")

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Write a file; on a local disk it is synchronised before its reference is given out."""
        name = uuid.uuid4().hex
        # Directories with millions of files are slow to list.
        below = f"{name[:2]}/{name}"
        path = f"{self._path}/{below}"
        try:
            self._files.makedirs(f"{self._path}/{name[:2]}", exist_ok=True)
            with self._files.open(path, "wb") as file:
                for part in parts_of(data):
                    file.write(part)
                if "file" in _schemes(self._files):
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.rm_file(path)
            raise self._failed(error) from error
        return reference(NAME, f"{self.root}/{below}", data)

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Read files, together where the file system can; never more bytes than the references say."""
        paths = [self._below(ref.id) for ref in refs]
        if not paths:
            return []
        # One byte more tells a file that is longer than it should be.
        ends = [ref.size + 1 for ref in refs]
        found: list[Any] = self._files.cat_ranges(paths, [0] * len(paths), ends, on_error="return")
        for ref, data in zip(refs, found, strict=True):
            if isinstance(data, FileNotFoundError):
                raise missing(NAME, ref.id) from data
            if isinstance(data, OSError):
                raise self._failed(data) from data
            if isinstance(data, BaseException):
                raise data
        return [verified(ref, data) for ref, data in zip(refs, found, strict=True)]

    def delete(self, ids: Sequence[str]) -> None:
        """Remove files."""
        for path in [self._below(payload_id) for payload_id in ids]:
            try:
                self._files.rm_file(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """There is nothing to let go of."""

    def _below(self, payload_id: str) -> str:
        names = payload_id.removeprefix(f"{self.root}/")
        if names == payload_id or not _NAMES.fullmatch(names):
            raise refused(NAME, payload_id, f"{payload_id!r} is not below the root of the store, {self.root}")
        return f"{self._path}/{names}"

    def _failed(self, error: OSError) -> Exception:
        if error.errno in (28, 122):
            return full(NAME, f"{self.root} is full: {error}")
        return unavailable(NAME, f"{self.root}: {type(error).__name__}: {error}")


def _schemes(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
