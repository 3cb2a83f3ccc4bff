"""How many files a service may have open: each connection is one.

The limit that a shell or systemd gives is often 1024, kept small for programs that use select(); ours do not.
"""

from __future__ import annotations

import resource
from typing import Final

WANTED: Final = 65_536
"""`max_connections` at several addresses, beside the files of the journal."""


def raise_open_files() -> None:
    """Raise the limit of this process as far as it may by itself, up to `WANTED`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < best:
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
