"""Payload bytes on disk, in append-only segment files.

A directory of `segment-<number>` files, written by one process. `record` has the format, `store.SegmentStore` what the
buffer uses.
"""

from services.buffer.segments.options import SegmentOptions
from services.buffer.segments.store import SegmentStats, SegmentStore

__all__ = ["SegmentOptions", "SegmentStats", "SegmentStore"]
