"""Where a benchmark's requests come from: random token ids, a ShareGPT file, or a JSON lines file.

Pure apart from reading the file named. Same seed and file, same requests. Does not know HTTP.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdctl.errors import UsageError

DatasetName = Literal["random", "sharegpt", "jsonl"]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the path it is posted to and what it says, without model and streaming flags."""

    path: str
    body: Mapping[str, Any]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """The first question and answer of a ShareGPT conversation."""

    question: str
    answer: str


def token_prompt(ids: Sequence[int], max_tokens: int) -> Prompt:
    return Prompt(COMPLETIONS, {"prompt": list(ids)}, max_tokens)


def chat_prompt(messages: Sequence[Mapping[str, Any]], max_tokens: int) -> Prompt:
    return Prompt(CHAT, {"messages": list(messages)}, max_tokens)


def ordinary_ids(vocab_size: int) -> range:
    """The middle 80 % of a vocabulary: tokenizers keep special tokens at its ends."""
    margin = vocab_size // 10
    return range(margin, vocab_size - margin)


def sample_text() -> str:
    """Text whose tokens can stand for the vocabulary of an endpoint that does not say its size."""
    rng = random.Random("sample")
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(3000))
    return " ".join(words)


def random_prompts(
    count: int, *, input_len: int, output_len: int, ids: Sequence[int], seed: int
) -> list[Prompt]:
    """Prompts of exactly `input_len` token ids out of `ids`."""
    rng = random.Random(f"prompts/{seed}")
    return [token_prompt(rng.choices(ids, k=input_len), output_len) for _ in range(count)]


def jsonl_prompts(path: Path, count: int, *, output_len: int | None, default: int) -> list[Prompt]:
    """The first `count` lines: `{"messages": [...]}` or `{"prompt": ...}`, `max_tokens` optional.

    `output_len` overrides the file; `default` is for lines that say nothing.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if len(prompts) == count:
            break
        if line.strip():
            prompts.append(_jsonl_prompt(f"{path}:{number}", line, output_len, default))
    if not prompts:
        raise UsageError(f"{path}: no requests in it", hint="one JSON object a line")
    return prompts


def sharegpt_conversations(path: Path, *, seed: int) -> list[Conversation]:
    """All usable conversations, in an order drawn from `seed`."""
    try:
        entries = json.loads(_read(path))
    except ValueError as e:
        raise UsageError(f"{path}: not JSON: {e}") from e
    if not isinstance(entries, list):
        raise UsageError(f"{path}: expected a list of conversations", hint="see docs/bench.md")
    found = [c for entry in entries if (c := _conversation(entry)) is not None]
    if not found:
        raise UsageError(
            f"{path}: none of its {len(entries)} entries begins with a question and an answer",
            hint='expected [{"conversations": [{"from": "human", "value": ...}, ...]}, ...]',
        )
    random.Random(f"sharegpt/{seed}").shuffle(found)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(f"--dataset-path {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--dataset-path {path}: not UTF-8 text ({e.reason})") from e


def _jsonl_prompt(where: str, line: str, output_len: int | None, default: int) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as e:
        raise UsageError(f"{where}: not JSON: {e}") from e
    if not isinstance(entry, dict):
        raise UsageError(f'{where}: expected an object with "messages" or "prompt"')
    max_tokens = output_len or entry.get("max_tokens", default)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise UsageError(f"{where}: max_tokens must be a whole number of at least 1")
    match entry:
        case {"messages": list(messages)} if messages and all(map(_is_message, messages)):
            return chat_prompt(messages, max_tokens)
        case {"messages": _}:
            raise UsageError(f"{where}: messages must be a list of objects with role and content")
        case {"prompt": str(text)} if text:
            return Prompt(COMPLETIONS, {"prompt": text}, max_tokens)
        case {"prompt": list(ids)} if ids and all(type(i) is int for i in ids):
            return token_prompt(ids, max_tokens)
        case {"prompt": _}:
            raise UsageError(f"{where}: prompt must be text or a list of token ids, not empty")
    raise UsageError(f'{where}: expected an object with "messages" or "prompt"')


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _conversation(entry: object) -> Conversation | None:
    match entry:
        case {
            "conversations": [
                {"from": "human" | "user", "value": str(question)},
                {"from": "gpt" | "assistant", "value": str(answer)},
                *_,
            ]
        } if question.strip() and answer.strip():
            return Conversation(question, answer)
    return None
