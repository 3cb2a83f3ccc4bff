"""The services of Turnout. Only the command, deployment code and tests import a service."""
