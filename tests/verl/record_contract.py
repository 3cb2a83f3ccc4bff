"""Records the methods of verl that we call: `python record_contract.py FOLDER_OF_THE_PACKAGE VERSION` prints the JSON.

Read from its source by its syntax, so it needs neither verl's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = {
    "vLLMHttpServer": "workers/rollout/vllm_rollout/vllm_async_server.py",
    "vLLMReplica": "workers/rollout/vllm_rollout/vllm_async_server.py",
    "GlobalRequestLoadBalancer": "workers/rollout/router.py",
    "TokenOutput": "workers/rollout/replica.py",
}
ENGINE = "vLLMHttpServer"


def main(folder: str, version: str) -> None:
    """Print the record."""
    record: dict[str, Any] = {"version": version, "classes": {}}
    for name, path in CLASSES.items():
        tree = ast.parse((Path(folder) / path).read_text())
        node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = [each for each in functions if not each.name.startswith("_") or each.name == "__init__"]
        record["classes"][name] = {
            "methods": {each.name: _parameters(each.args) for each in public},
            "fields": [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ],
        }
        if name == ENGINE:
            record["engine_calls"] = _engine_calls(node)
    print(json.dumps(record, indent=1, sort_keys=True))


def _parameters(arguments: ast.arguments) -> dict[str, Any]:
    names = [each.arg for each in arguments.args][1:]
    required = names[: len(names) - len(arguments.defaults)]
    extra = [each.arg for each in arguments.kwonlyargs]
    needed = [
        each.arg for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None
    ]
    return {"parameters": names + extra, "required": required + needed}


def _engine_calls(node: ast.ClassDef) -> dict[str, list[str]]:
    """What the server calls of vLLM's engine, with the names that it gives."""
    found: dict[str, set[str]] = {}
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = ast.unparse(call.func.value)
            if owner == "self.engine":
                found.setdefault(call.func.attr, set()).update(each.arg for each in call.keywords if each.arg)
    return {name: sorted(names) for name, names in sorted(found.items())}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
