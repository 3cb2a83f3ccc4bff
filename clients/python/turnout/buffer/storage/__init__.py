"""Generated code of turnout.buffer.storage."""
