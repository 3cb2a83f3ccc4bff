"""What `turnout demo-vllm` refuses before it starts anything."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from services.cli import main


def find_vllm(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """Have vLLM installed or not."""
    found = ModuleSpec("vllm", None) if there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "vllm" else None)


def test_without_vllm_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2."""
    find_vllm(monkeypatch, there=False)
    assert main.run(["demo-vllm"]) == 2
    assert "make demo-vllm" in capsys.readouterr().err


def test_a_prompt_that_the_model_cannot_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With file, id and character."""
    find_vllm(monkeypatch, there=True)
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "p", "prompt": "Ä"}\n', encoding="utf-8")
    assert main.run(["demo-vllm", "--prompts", str(path)]) == 2
    assert f"{path}: prompt 'p': no token for 'Ä'" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_before_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not after minutes of it."""
    find_vllm(monkeypatch, there=True)
    assert main.run(["demo-vllm", "--picture", str(tmp_path / "nowhere" / "a.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
