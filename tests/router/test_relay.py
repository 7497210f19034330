"""Cutting a byte stream at SSE event boundaries."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.router.relay import MAX_EVENT_BYTES, EventCutter

line = st.text('ab: {}"', min_size=1, max_size=8).map(str.encode)
events = st.lists(st.lists(line, min_size=1, max_size=3), max_size=6)


def pieces_of(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(events, st.sampled_from([b"\n", b"\r\n"]), line, st.lists(st.integers(0, 500), max_size=8))
def test_only_whole_events_pass_and_no_byte_is_lost(
    content: list[list[bytes]], newline: bytes, tail: bytes, cuts: list[int]
) -> None:
    text = b"".join(newline.join(lines) + 2 * newline for lines in content) + tail
    cutter = EventCutter()
    passed = b""
    for piece in pieces_of(text, cuts):
        passed += cutter.feed(piece)
        assert passed == b"" or re.search(rb"(\n\n|\n\r\n)$", passed)
    assert passed + cutter.rest() == text
    assert cutter.rest() == tail


def test_what_is_no_event_stream_at_all_is_not_held_for_ever() -> None:
    cutter = EventCutter()
    passed = sum(len(cutter.feed(b"x" * 65536)) for _ in range(64))
    assert passed > 0
    assert len(cutter.rest()) <= MAX_EVENT_BYTES


@pytest.mark.parametrize(
    ("text", "done", "leg"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True, ""),
        (b'data: {"x": "data: [DONE]"}\n\n', False, ""),
        (b'data: {}\n\ndata: {"error": {"message": "m", "leg": "prefill"}}\n\n', False, "prefill"),
        (b'data: {}\r\n\r\ndata: {"error": {"message": "m"}}\r\n\r\n', False, "decode"),
        (b'data: {"error": {"leg": "prefill"}}\n\ndata: {}\n\n', False, ""),
        (b"", False, ""),
    ],
)
def test_the_last_event_tells_how_the_stream_ended(text: bytes, done: bool, leg: str) -> None:
    cutter = EventCutter()
    cutter.feed(text)
    assert (cutter.done, cutter.failed_leg()) == (done, leg)
