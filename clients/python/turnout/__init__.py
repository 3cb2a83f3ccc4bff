"""The Python client of Turnout."""
