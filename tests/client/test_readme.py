"""The examples of the client's README."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_compile_and_use_names_that_exist(code: str) -> None:
    """The first thing a newcomer copies must not fail at its import, nor pass an option that was renamed."""
    tree = ast.parse(code)
    scope: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), str(README), "exec"), scope)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and isinstance(scope.get(call.func.id), type):
            made = scope[call.func.id]
            known = getattr(made, "__dataclass_fields__", None)
            if known is not None:
                assert {keyword.arg for keyword in call.keywords} <= set(known), call.func.id


def test_there_are_examples() -> None:
    """The test above passes for a README without any."""
    assert len(EXAMPLES) == 4
