"""Records what an SGLang wheel defines of what we call: `python record_contract.py WHEEL` prints the JSON.

Read from its source by its syntax, since SGLang does not import without a GPU.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from typing import Any

SERVER = "sglang/srt/entrypoints/http_server.py"
LOADS = "sglang/srt/entrypoints/v1_loads.py"
BODIES = "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"
CONSTANTS = "sglang/srt/constants.py"
CALLED = re.compile(
    r"/(v1/loads|v1/models|model_info|server_info|generate|abort_request|flush_cache|hicache/storage-backend/clear"
    r"|.*(memory_occupation|pause_generation|continue_generation|weight_update|update_weight|weights_update_group).*)"
)
"""The routes that may matter to us."""


def main(wheel: str) -> None:
    """Print the record."""
    with zipfile.ZipFile(wheel) as archive:
        trees = {name: ast.parse(archive.read(name)) for name in (SERVER, LOADS, BODIES, SAMPLING, CONSTANTS)}
    classes = {node.name: node for node in trees[BODIES].body if isinstance(node, ast.ClassDef)}
    routes = _routes(trees[SERVER]) | _routes(trees[LOADS])
    routes = {path: route for path, route in routes.items() if CALLED.fullmatch(path)}
    bodies = sorted({route["body"] for route in routes.values() if route["body"] in classes})
    sampling = next(
        node for node in trees[SAMPLING].body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    )
    match = re.search(r"sglang-([^-]+)-", wheel)
    record = {
        "version": match.group(1) if match else "",
        "routes": dict(sorted(routes.items())),
        "bodies": {name: _fields(classes, name) for name in bodies},
        "sampling": sorted(_own_fields(sampling)),
        "tags": sorted(
            str(node.value.value)
            for node in trees[CONSTANTS].body
            if isinstance(node, ast.Assign)
            and node.targets[0].id.startswith("GPU_MEMORY_TYPE_")  # type: ignore[attr-defined]
            and isinstance(node.value, ast.Constant)
        ),
        "pause_modes": sorted(re.findall(r"'(\w+)'", _own_fields(classes["PauseGenerationReqInput"])["mode"]["type"])),
    }
    print(json.dumps(record, indent=1, sort_keys=True))


def _routes(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)):
                continue
            verb, arguments = decorator.func.attr, decorator.args
            if verb not in ("get", "post", "api_route") or not isinstance(arguments[0], ast.Constant):
                continue
            methods = [verb.upper()]
            for keyword in decorator.keywords:
                if keyword.arg == "methods":
                    methods = ast.literal_eval(keyword.value)
            names = {argument.arg: ast.unparse(argument.annotation or ast.Constant("")) for argument in node.args.args}
            body = names.get("obj", "")
            match = re.search(r"(\w+)(?:\]+)?, Body", body) or re.fullmatch(r"(\w+)", body)
            found[str(arguments[0].value)] = {
                "methods": sorted(methods),
                "body": match.group(1) if match else None,
                "query": sorted(names.keys() - {"obj", "request", "raw_request", "tokenizer_manager"}),
            }
    return found


def _fields(classes: dict[str, ast.ClassDef], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields |= _fields(classes, base.id)
    return fields | _own_fields(classes[name])


def _own_fields(node: ast.ClassDef) -> dict[str, Any]:
    return {
        line.target.id: {"type": ast.unparse(line.annotation), "required": line.value is None}
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


if __name__ == "__main__":
    main(sys.argv[1])
