"""Generated code of turnout.buffer.v1."""
