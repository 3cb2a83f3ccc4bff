"""Generated code of turnout.scheduler."""
