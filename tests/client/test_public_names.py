"""What the packages offer, and that importing them does nothing."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

PACKAGES = [
    "turnout.channels",
    "turnout.client",
    "turnout.stores",
    "turnout.tensors",
    "turnout.trainer",
    "turnout.worker",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_complete_and_real(name: str) -> None:
    """A name that is missing or misspelt in `__all__` breaks `from turnout.client import *` and the documentation."""
    module = importlib.import_module(name)
    assert module.__all__ == sorted(set(module.__all__), key=lambda text: (not text.isupper(), text[0].islower(), text))
    assert all(hasattr(module, exported) for exported in module.__all__)
    public = {key for key, value in vars(module).items() if not key.startswith("_") and not hasattr(value, "__path__")}
    assert public == set(module.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_modules_are_private(name: str) -> None:
    """A public module is an address that users hold on to and that can never move again."""
    package = importlib.import_module(name)
    assert all(found.name.startswith("_") for found in pkgutil.iter_modules(package.__path__))


def test_importing_opens_nothing() -> None:
    """A data loader that forks after importing must not inherit threads or sockets."""
    code = (
        "import json, os, threading\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import turnout.client, turnout.stores, turnout.trainer, turnout.worker\n"
        "client = turnout.client.BufferClient('127.0.0.1:1')\n"
        "after = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "         if fd not in before and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(json.dumps([threading.active_count(), [fd for fd in after if 'socket' in fd]]))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(answer.stdout) == [1, []]


def test_client_does_not_import_the_servers() -> None:
    """The client is installed alone; an import of `services` would fail at every user's place."""
    code = (
        "import sys, turnout.client, turnout.trainer, turnout.worker\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'services'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "[]"
