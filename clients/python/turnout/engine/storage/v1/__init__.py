"""Generated code of turnout.engine.storage.v1."""
