"""Generated code of turnout.scheduler.v1."""
