"""A small honest CPU engine: real memory, a calibrated decode speed, a deterministic pseudo language model."""
