"""Which records a replay buffer writes and reads."""

from __future__ import annotations

from typing import Final

SCHEMA: Final = "buffer/2"
"""Raised whenever a program of the former number could misread what is stored, payload segments included."""
