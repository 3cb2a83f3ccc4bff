"""Generated code of turnout.engine."""
