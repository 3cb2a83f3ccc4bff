"""Benches of the services, each beside a bare baseline."""
