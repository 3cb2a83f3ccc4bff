"""Which records an engine controller writes and reads."""

from __future__ import annotations

from typing import Final

SCHEMA: Final = "engine/1"
"""Raised whenever a program of the former number could misread what is stored."""
