"""Generated code of turnout.scheduler.storage.v1."""
