"""How the buffer survives: its decisions in the journal, images of its runs in snapshots and checkpoints.

The formats are those of `turnout.buffer.storage.v1`; docs/durability.md describes them.
"""
