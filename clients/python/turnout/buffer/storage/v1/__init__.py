"""Generated code of turnout.buffer.storage.v1."""
