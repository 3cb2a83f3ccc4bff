"""Prompts files: what is accepted, and how a fault is named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from services.demo.prompts import PromptsError, draws, load_prompts, sample_file


def test_the_sample_ships_and_loads() -> None:
    """A package without its data file, or with a broken line, would leave the demo without prompts."""
    prompts = load_prompts(sample_file())
    assert len(prompts) == 200
    assert len({prompt.prompt_id for prompt in prompts}) == 200
    assert len({prompt.text for prompt in prompts}) == 200


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        (b'{"prompt": "a"}\n\n["a"]\n', "line 3: must be an object"),
        (b'{"prompt": "a"}\n{"prompt": ""}\n', "line 2: 'prompt' must be text that is not empty"),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2: 'prompt' must be text that is not empty"),
        (b'{"text": "a"}\n', "line 1: unknown key 'text'"),
        (b'{"prompt": "a", "id": 7}\n', "line 1: 'id' must be text"),
        (b'{"prompt": "a", "id": ""}\n', "line 1: 'id' must be text"),
        (b'{"prompt": "a", "id": "x\\u0000y"}\n', "line 1: 'id' must be text"),
        (b'{"prompt": "a", "id": "\\ud800"}\n', "line 1: 'id' must be text"),
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "line 2: id 'x' was used in line 1"),
        (b'{"prompt": "\xff"}\n', "line 1: not UTF-8"),
        (b'{"prompt": "' + b"a" * (1 << 20) + b'"}\n', "line 1: longer than"),
        (b"\n\n", "holds no prompts"),
        (b"", "holds no prompts"),
    ],
)
def test_a_fault_in_a_prompts_file_names_its_line(tmp_path: Path, content: bytes, fault: str) -> None:
    """`--prompts` with a broken file must tell where to look, not fail in the middle of a job."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptsError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert fault in str(caught.value)


def test_a_missing_prompts_file_is_named(tmp_path: Path) -> None:
    """A wrong path would otherwise end in an OSError without a hint."""
    with pytest.raises(PromptsError, match="cannot be read"):
        load_prompts(tmp_path / "none.jsonl")


def test_lines_without_ids_are_numbered_and_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    """Files from other tools have neither ids nor clean beginnings."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "zwei \xc3\xa4"}')
    assert [(p.prompt_id, p.text) for p in load_prompts(path)] == [("1", "one"), ("3", "zwei ä")]


def test_draws_depend_on_seed_and_file_alone_and_never_repeat_a_group() -> None:
    """Two modes of one seed must get the same groups, or their figures could not be compared."""
    prompts = load_prompts(sample_file())
    first = list(islice(draws(prompts, 3), 450))
    assert first == list(islice(draws(prompts, 3), 450))
    assert len({draw.group_id for draw in first}) == 450
    assert {draw.prompt for draw in first[:200]} == set(prompts)
    assert [d.prompt for d in first[:200]] != [d.prompt for d in first[200:400]]
    other = list(islice(draws(prompts, 4), 450))
    assert [d.group_id for d in first] != [d.group_id for d in other]
    assert {d.token_ids for d in first}.isdisjoint({d.token_ids for d in other})
    assert len({d.token_ids for d in first}) == 450
