"""Runs a snippet of a page as a file, as a notebook would: it may await, and use names that are the reader's own.

python -m tests.docs.snippet GIVEN SNIPPET THEN
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path


def main(*paths: str) -> None:
    """Run what is given, the snippet, and what looks at it, with one set of names."""
    names: dict[str, object] = {"__name__": "__main__"}
    for path in paths:
        code = compile(Path(path).read_text(encoding="utf-8"), path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, names))
        else:
            exec(code, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
