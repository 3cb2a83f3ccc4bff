"""The demo: one training job, run without and with switching, by real processes over the real services."""
