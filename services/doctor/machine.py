"""This machine: file descriptors, and the disk under a data directory."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from services.doctor.finding import Finding, ok, problem, warning

FILES_WANTED: Final = 4096
"""A client takes two connections, each a descriptor; a cluster has some hundred workers."""

FREE_BYTES: Final = 1 << 30
"""Below it a buffer that holds payloads is full within minutes."""

FREE_SHARE: Final = 0.05

FSYNC_S: Final = 0.02
"""A local SSD takes a few milliseconds, a disk that turns about ten."""

FSYNC_BAD_S: Final = 0.2
"""Every answer would wait that long with durability fsync, and compaction holds commits up with the others."""

FSYNCS: Final = 9

_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "9p", "beegfs", "gpfs")
"""File systems on which SQLite's write-ahead log is not safe, as it shares memory between processes."""


def check_files(limit: int | None = None) -> Finding:
    """Whether a service may open enough files. `limit`: the most it may raise its own to, in place of the present."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if limit is None else limit
    if most == resource.RLIM_INFINITY:
        return ok("files", "open files", "no limit")
    if most < FILES_WANTED:
        advice = f"raise the hard limit: LimitNOFILE={FILES_WANTED} in its unit, or /etc/security/limits.conf"
        return problem("files", "open files", f"at most {most}; each client takes two", advice)
    return ok("files", "open files", f"at most {most}, which services raise theirs to (now {soft})")


def check_data_dir(path: Path, mounts: str | None = None) -> Iterator[Finding]:
    """Whether a service could keep its state in `path`. `mounts`: in place of /proc/mounts."""
    # Unlike Path.exists it raises nothing where a parent may not be searched.
    place = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))
    subject = str(path)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield problem("disk", subject, f"{place} is no directory one can write to", f"chown it to the user {_user()}")
        return
    yield _space(subject, place)
    kind = _file_system(place, mounts)
    if kind in _NETWORK:
        advice = "use a disk of this machine: SQLite's write-ahead log is not safe on a network file system"
        yield problem("disk", subject, f"is on {kind}", advice)
    yield _fsync(subject, place)


def _user() -> str:
    return os.environ.get("USER") or str(os.getuid())


def _space(subject: str, place: Path) -> Finding:
    usage = shutil.disk_usage(place)
    text = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}"
    if usage.free < FREE_BYTES:
        return problem(
            "disk", subject, text, "make room, or choose another --data-dir; at 0 what needs space is refused"
        )
    if usage.free < FREE_SHARE * usage.total:
        return warning("disk", subject, text, "make room before the disk is full")
    return ok("disk", subject, text)


def _file_system(place: Path, mounts: str | None) -> str:
    """The kind of the file system that holds `place`, empty where the system does not say."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) >= 3:
            point = Path(fields[1].replace("\\040", " "))
            if place.resolve().is_relative_to(point) and len(point.parts) >= best:
                best, found = len(point.parts), fields[2]
    return found


def _fsync(subject: str, place: Path) -> Finding:
    try:
        took = fsync_seconds(place)
    except OSError as error:
        return problem(
            "fsync", subject, f"failed: {error.strerror}", "choose another --data-dir: this disk is at fault"
        )
    return judge_fsync(subject, took)


def fsync_seconds(place: Path) -> float:
    """Median wall seconds that a small write takes there until the disk confirms it."""
    took = []
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(FSYNCS):
            begun = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - begun)
    return median(took)


def judge_fsync(subject: str, seconds: float) -> Finding:
    """What such a time means."""
    text = f"a write is confirmed after {1000 * seconds:.1f} ms"
    advice = "use a local SSD, or --durability os, which survives the death of the process alone"
    if seconds > FSYNC_BAD_S:
        return problem("fsync", subject, text, advice)
    return warning("fsync", subject, text, advice) if seconds > FSYNC_S else ok("fsync", subject, text)
