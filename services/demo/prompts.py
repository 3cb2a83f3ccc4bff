"""Prompts from a JSONL file, and the order in which a job uses them.

A line is a JSON object with `prompt` (text, not empty) and optionally `id` (text, unique in the file; without one it is
the line number). Other keys are an error, so that a misspelt one is not lost.

Invariants: a fault names the file and the line; the stream of prompts depends on file and seed alone; every pass
through the file has an order of its own, and the same prompt in another pass is another group.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, Final

MAX_LINE_BYTES: Final = 1 << 20
"""A prompt travels inside messages; a longer line is a wrong file."""

_KEYS: Final = ("id", "prompt")
_MAX_ID_BYTES: Final = 256
"""A group's id is made of it and has 512 bytes."""

_FIRST_TEXT_TOKEN: Final = 256
"""Tokens are the bytes of the text; numbers from here on mark seed and pass."""


class PromptsError(Exception):
    """The prompts file cannot be used."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the file."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt as one group of the job."""

    group_id: str
    prompt: Prompt
    token_ids: tuple[int, ...]


def sample_file() -> Path:
    """Return the prompts that ship with the package."""
    return Path(str(resources.files("services.demo") / "prompts.jsonl"))


def load_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, in its order; raises PromptsError naming the line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptsError(f"{path}: cannot be read: {error.strerror or error}") from error
    prompts: list[Prompt] = []
    lines_of: dict[str, int] = {}
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        prompt = _parse(raw, number, f"{path}, line {number}")
        if prompt.prompt_id in lines_of:
            earlier = lines_of[prompt.prompt_id]
            raise PromptsError(f"{path}, line {number}: id {prompt.prompt_id!r} was used in line {earlier} already")
        lines_of[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptsError(f"{path}: holds no prompts")
    return prompts


def draws(prompts: list[Prompt], seed: int) -> Iterator[Draw]:
    """Yield groups without end: pass after pass through the file, each shuffled anew."""
    for turn in count():
        order = list(prompts)
        random.Random(f"{seed}/{turn}").shuffle(order)
        for prompt in order:
            marks = (_FIRST_TEXT_TOKEN + seed % 65_536, _FIRST_TEXT_TOKEN + turn % 65_536)
            yield Draw(f"{prompt.prompt_id}/{turn}", prompt, (*marks, *prompt.text.encode("utf-8", "replace")))


def _parse(raw: bytes, number: int, where: str) -> Prompt:
    if len(raw) > MAX_LINE_BYTES:
        raise PromptsError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
    try:
        value: Any = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptsError(f"{where}: not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise PromptsError(f'{where}: must be an object like {{"id": "a", "prompt": "..."}}')
    for key in value:
        if key not in _KEYS:
            raise PromptsError(f"{where}: unknown key {key!r} (known: {', '.join(_KEYS)})")
    text = value.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise PromptsError(f"{where}: 'prompt' must be text that is not empty")
    prompt_id = value.get("id", str(number))
    if not isinstance(prompt_id, str) or not _is_id(prompt_id):
        raise PromptsError(
            f"{where}: 'id' must be text of 1 to {_MAX_ID_BYTES} bytes without control characters, not {prompt_id!r}"
        )
    return Prompt(prompt_id, text)


def _is_id(text: str) -> bool:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 0 < size <= _MAX_ID_BYTES and all(character >= " " and character != "\x7f" for character in text)
