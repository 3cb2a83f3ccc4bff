"""Certificates for tests, made in memory and laid out as files."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass
class Authority:
    """An authority of its own, in a directory."""

    directory: Path

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        self.ca = self.directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *identities: str, not_after: datetime.datetime | None = None) -> tuple[Path, Path]:
        """Write a certificate for `identities` and its key; a second one of a name replaces the first."""
        begins = None if not_after is None else not_after - datetime.timedelta(days=90)
        issued = self._ca.issue_cert(*identities, not_before=begins, not_after=not_after)
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        for path, blob in (
            (cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems)),
            (key, issued.private_key_pem.bytes()),
        ):
            # As a tool that renews them does: never half a file under the name.
            new = path.with_suffix(path.suffix + ".new")
            new.write_bytes(blob)
            new.replace(path)
        return cert, key
