"""Generated code of turnout.engine.storage."""
