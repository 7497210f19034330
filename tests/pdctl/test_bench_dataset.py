"""Data sets: reproducible, exact in length, and clear about what is wrong in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.dataset import (
    CHAT,
    COMPLETIONS,
    jsonl_prompts,
    ordinary_ids,
    random_prompts,
    sample_text,
    sharegpt_conversations,
)
from pdctl.errors import UsageError


@given(
    count=st.integers(1, 5),
    length=st.integers(1, 40),
    vocab=st.integers(2, 200_000),
    seed=st.integers(-5, 1 << 40),
)
def test_random_prompts(count: int, length: int, vocab: int, seed: int) -> None:
    ids = ordinary_ids(vocab)
    prompts = random_prompts(count, input_len=length, output_len=7, ids=ids, seed=seed)
    assert len(prompts) == count
    for prompt in prompts:
        assert prompt.path == COMPLETIONS and prompt.max_tokens == 7
        assert len(prompt.body["prompt"]) == length
        assert all(vocab // 10 <= i < vocab - vocab // 10 for i in prompt.body["prompt"])


def test_random_prompts_follow_the_seed_and_differ() -> None:
    def make(seed: int) -> list[list[int]]:
        ids = ordinary_ids(49_152)
        made = random_prompts(4, input_len=50, output_len=1, ids=ids, seed=seed)
        return [p.body["prompt"] for p in made]

    assert make(0) == make(0)
    assert make(0) != make(1)
    assert len({p[0] for p in make(0)}) == 4  # no common prefix for a cache to find


def test_the_sample_text_is_always_the_same_and_various() -> None:
    assert sample_text() == sample_text()
    assert len(set(sample_text().split())) > 2000


def _file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


MESSAGES = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}'


def test_jsonl_in_its_three_forms(tmp_path: Path) -> None:
    path = _file(tmp_path, MESSAGES, "", '{"prompt": "once"}', '{"prompt": [5, 6]}', "not reached")
    prompts = jsonl_prompts(path, 3, output_len=None, default=32)
    assert [(p.path, p.max_tokens) for p in prompts] == [
        (CHAT, 9),
        (COMPLETIONS, 32),
        (COMPLETIONS, 32),
    ]
    assert prompts[0].body == {"messages": [{"role": "user", "content": "hi"}]}
    assert prompts[1].body == {"prompt": "once"}
    assert prompts[2].body == {"prompt": [5, 6]}


def test_output_len_overrides_the_file(tmp_path: Path) -> None:
    prompts = jsonl_prompts(_file(tmp_path, MESSAGES), 5, output_len=3, default=32)
    assert [p.max_tokens for p in prompts] == [3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ("{}", '"messages" or "prompt"'),
        ('{"messages": []}', "messages must be"),
        ('{"messages": ["hi"]}', "messages must be"),
        ('{"prompt": ""}', "prompt must be"),
        ('{"prompt": [1, "a"]}', "prompt must be"),
        ('{"prompt": [true]}', "prompt must be"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": "9"}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = _file(tmp_path, MESSAGES, "", line)
    with pytest.raises(UsageError) as error:
        jsonl_prompts(path, 10, output_len=None, default=32)
    assert f"{path}:3: " in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        jsonl_prompts(tmp_path / "none", 1, output_len=None, default=1)
    with pytest.raises(UsageError, match="no requests"):
        jsonl_prompts(_file(tmp_path, ""), 1, output_len=None, default=1)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        sharegpt_conversations(binary, seed=0)


def _turns(*turns: tuple[str, str]) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


def test_sharegpt_takes_first_question_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    entries = [
        _turns(("human", "q1"), ("gpt", "a1"), ("human", "q2")),
        _turns(("gpt", "a0"), ("human", "q0")),
        _turns(("user", "q3"), ("assistant", "a3")),
        _turns(("human", "q4")),
        _turns(("human", " "), ("gpt", "a5")),
        {"items": []},
    ]
    path.write_text(json.dumps(entries))
    found = sharegpt_conversations(path, seed=0)
    assert sorted((c.question, c.answer) for c in found) == [("q1", "a1"), ("q3", "a3")]
    assert sharegpt_conversations(path, seed=0) == found


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("{}", "expected a list"), ("[{}]", "none of its 1")]
)
def test_bad_sharegpt(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        sharegpt_conversations(path, seed=0)
