"""Engines and balancers that are Ray actors."""
