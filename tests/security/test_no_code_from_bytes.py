"""Nothing that the network can reach turns bytes into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PLACES: Final = ("services", "clients/python/turnout")

MODULES: Final = frozenset(
    {
        "pickle",
        "cPickle",
        "_pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
        "code",
        "codeop",
    }
)
"""Reading with these runs what the bytes say."""

BUILTINS: Final = frozenset({"eval", "exec", "compile", "__import__"})
ATTRIBUTES: Final = frozenset({"loads_pickle", "read_pickle", "to_pickle", "unsafe_load", "full_load", "import_module"})
COMMANDS: Final = frozenset({"system", "popen"})

ALLOWED: Final = {
    ("services/cli/lazy.py", "import_module"): "names of the command's own table",
    ("services/engine/cluster/host.py", "import_module"): "a constant of ours, handed to an actor that we start",
    ("services/engine/cluster/verl.py", "__import__"): "the word 'os', in a function that travels to an actor whole",
    (
        "services/scheduler/storage/policy_image.py",
        "import_module",
    ): "a policy's own modules, to compare them",
    ("clients/python/turnout/integrations/verl/__init__.py", "import_module"): "names of a table beside it",
}
"""What is found and is no way in, with the reason. Ray, vLLM and TransferQueue pickle between their own processes, on
their own ports, which is theirs to protect (SECURITY.md); no byte of a request of ours is unpickled."""


def _findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(function, ast.Name):
        if function.id in BUILTINS | ATTRIBUTES:
            yield node.lineno, function.id
        return
    if not isinstance(function, ast.Attribute):
        return
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    name = function.attr
    if name in ATTRIBUTES or (owner == "os" and name in COMMANDS) or (owner == "builtins" and name in BUILTINS):
        yield node.lineno, name
    elif owner == "yaml" and name in ("load", "load_all"):
        yield node.lineno, f"yaml.{name}"
    elif name == "load" and owner in ("torch", "np", "numpy"):
        safe = {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}[owner]
        value = keywords.get(safe[0])
        if not (isinstance(value, ast.Constant) and value.value is safe[1]):
            yield node.lineno, f"{owner}.load"
    shell = keywords.get("shell")
    if isinstance(shell, ast.Constant) and shell.value is True:
        yield node.lineno, "shell=True"


def _all() -> dict[tuple[str, str], int]:
    found = {}
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            for line, what in _findings(ast.parse(path.read_text(encoding="utf-8"))):
                found[str(path.relative_to(ROOT)), what] = line
    return found


def test_no_byte_from_the_network_becomes_code() -> None:
    """One `pickle.loads` of a payload gives its sender every GPU; what is allowed is allowed by name."""
    found = _all()
    assert {place: line for place, line in found.items() if place not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set(), "allowed, and there no longer"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import marshal as m",
        "eval('1')",
        "exec(request.code)",
        "__import__(name)",
        "importlib.import_module(name)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "pandas.read_pickle(file)",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    """A search that finds nothing because it looks at nothing passes for ever."""
    assert list(_findings(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "yaml.safe_load(text)",
        "torch.load(file, weights_only=True)",
        "np.load(file, allow_pickle=False)",
        "json.loads(text)",
        "model.eval()",
        "re.compile(pattern)",
        "subprocess.run(['ls'])",
    ],
)
def test_the_search_leaves_harmless_calls_alone(text: str) -> None:
    """A list of exceptions that nobody reads hides the one that matters."""
    assert not list(_findings(ast.parse(text)))
