"""Long prompts and long conversations are tokenized beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from runtime.front.admission import encode_chat, encode_text


class Noting:
    """A tokenizer that notes whose thread it runs on."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(messages)]


@pytest.mark.parametrize(("chars", "beside"), [(10, False), (100_000, True)])
def test_a_long_text_does_not_hold_up_the_loop(chars: int, beside: bool) -> None:
    noting = Noting()
    assert asyncio.run(encode_text(chars, noting.encode, "x" * chars)) == [chars]
    assert (noting.threads != [threading.main_thread()]) == beside


@pytest.mark.parametrize(("count", "beside"), [(3, False), (10_000, True)])
def test_many_short_messages_do_not_hold_up_the_loop(count: int, beside: bool) -> None:
    noting: Any = Noting()
    messages = [{"role": "user", "content": ""}] * count
    assert asyncio.run(encode_chat(noting, messages)) == [count]
    assert (noting.threads != [threading.main_thread()]) == beside
