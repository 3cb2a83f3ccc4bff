"""Generated code of turnout.buffer."""
