"""The SSE parser: the same bytes give the same events, however they are cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.sse import Event, Parser


def _events(chunks: list[bytes]) -> list[Event]:
    parser = Parser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({p % (len(data) + 1) for p in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def test_plain_event() -> None:
    assert _events([b'data: {"a": 1}\n\n']) == [Event("message", '{"a": 1}')]


def test_named_event_comment_and_several_data_lines() -> None:
    stream = b": keep-alive\n\nevent: error\ndata: one\ndata:two\nid: 7\n\ndata: x\n\n"
    assert _events([stream]) == [Event("error", "one\ntwo"), Event("message", "x")]


def test_carriage_returns_end_lines_alone_and_with_a_line_feed() -> None:
    assert _events([b"data: a\r\rdata: b\r\n\r\ndata: c\n\n"]) == [
        Event("message", "a"),
        Event("message", "b"),
        Event("message", "c"),
    ]


def test_crlf_cut_between_its_two_bytes_is_one_line_end() -> None:
    assert _events([b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n"]) == [Event("message", "a\nb")]


def test_text_cut_inside_a_character() -> None:
    data = "data: año\n\n".encode()
    cut = data.index(b"\xb1")
    assert _events([data[:cut], data[cut:]]) == [Event("message", "año")]


def test_an_event_without_its_blank_line_is_none() -> None:
    assert _events([b"data: whole\n\ndata: half\n"]) == [Event("message", "whole")]


def test_byte_order_mark_is_dropped_even_when_cut() -> None:
    assert _events([b"\xef", b"\xbb\xbfda", b"ta: x\n\n"]) == [Event("message", "x")]


def test_only_one_space_after_the_colon_goes() -> None:
    assert _events([b"data:  x\n\n"]) == [Event("message", " x")]


_LINE = st.one_of(
    st.sampled_from(["data", "data:", "event: error", ": note", "id: 3", "retry: 5", ""]),
    st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8).map(
        lambda t: f"data: {t}"
    ),
)


@given(
    lines=st.lists(st.tuples(_LINE, st.sampled_from(["\n", "\r", "\r\n"])), max_size=20),
    bom=st.booleans(),
    places=st.lists(st.integers(0, 1 << 16), max_size=30),
)
def test_any_cutting_gives_the_same_events(
    lines: list[tuple[str, str]], bom: bool, places: list[int]
) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + "".join(a + b for a, b in lines).encode()
    whole = _events([data])
    assert _events(_cut(data, places)) == whole
    assert _events([bytes([b]) for b in data]) == whole


@given(data=st.binary(max_size=60), places=st.lists(st.integers(0, 60), max_size=10))
def test_any_bytes_at_all_are_survived_alike(data: bytes, places: list[int]) -> None:
    assert _events(_cut(data, places)) == _events([data])


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1)),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_what_was_written_is_read_back(payloads: list[str], end: str) -> None:
    stream = "".join(f"data: {p}{end}{end}" for p in payloads).encode()
    assert [event.data for event in _events([stream])] == payloads
