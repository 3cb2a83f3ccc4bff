"""Help texts with examples."""

from __future__ import annotations


def with_examples(text: str, *examples: str) -> str:
    """Return a help text that ends with examples, each on a line of its own."""
    # "\b" keeps click from joining the lines that follow it.
    lines = "\n".join(f"  {example}" for example in examples)
    return f"{text}\n\n\b\nExamples:\n{lines}"
