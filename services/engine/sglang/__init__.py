"""Driving SGLang."""
