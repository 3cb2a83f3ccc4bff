"""Generated code of turnout.engine.v1."""
