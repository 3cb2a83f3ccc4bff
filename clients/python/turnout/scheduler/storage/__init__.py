"""Generated code of turnout.scheduler.storage."""
