"""Any cut of any text into tokens gives the text back, stop strings included."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runtime.front.detokenizer import Detokenizer


@dataclass
class Cuts:
    """A vocabulary made of one text's pieces: token i is piece i. Token -1 is special."""

    pieces: list[bytes]
    special_ids: frozenset[int] = field(default=frozenset({-1}))

    def token_bytes(self, token: int) -> bytes:
        return b"<special>" if token == -1 else self.pieces[token]


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({0, len(raw), *(a % (len(raw) + 1) for a in at)})
    return [raw[a:b] for a, b in pairwise(marks)]


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(Cuts(pieces), stop)
    out = [detokenizer.push(i) for i in range(len(pieces))]
    out.append(detokenizer.finish())
    return out, detokenizer.stopped


def oracle(text: str, stop: tuple[str, ...]) -> str:
    """Character by character: the text ends when it ends in a stop string, which is cut off."""
    for end in range(1, len(text) + 1):
        matching = [s for s in stop if text[:end].endswith(s)]
        if matching:
            return text[: end - max(map(len, matching))]
    return text


CUTS = st.lists(st.integers(0, 200), max_size=40)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), CUTS)
def test_any_cut_round_trips_in_whole_characters(text: str, at: list[int]) -> None:
    out, stopped = run(cut(text.encode(), at))
    assert "".join(out) == text and not stopped
    so_far = ""
    for piece in out:
        so_far += piece
        assert text.startswith(so_far)


@given(st.binary(max_size=40), CUTS)
def test_broken_bytes_decode_as_at_once(raw: bytes, at: list[int]) -> None:
    out, _ = run(cut(raw, at))
    assert "".join(out) == raw.decode("utf-8", "replace")


SMALL = st.text("ab ä", max_size=30)
STOPS = st.lists(st.text("ab ä", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(SMALL, CUTS, STOPS)
def test_stop_strings_are_cut_wherever_tokens_end(
    text: str, at: list[int], stop: tuple[str, ...]
) -> None:
    out, stopped = run(cut(text.encode(), at), stop)
    expected = oracle(text, stop)
    assert "".join(out) == expected
    assert stopped == (expected != text or any(s in text for s in stop))


@given(SMALL, CUTS, STOPS)
def test_text_is_held_only_while_a_stop_string_could_begin(
    text: str, at: list[int], stop: tuple[str, ...]
) -> None:
    pieces = cut(text.encode(), at)
    detokenizer = Detokenizer(Cuts(pieces), stop)
    sent, fed = "", b""
    for i, piece in enumerate(pieces):
        fed += piece
        sent += detokenizer.push(i)
        if detokenizer.stopped:
            return
        held = fed.decode("utf-8", "ignore")[len(sent) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_special_tokens_are_silent_and_do_not_split_characters() -> None:
    detokenizer = Detokenizer(Cuts(["é".encode()[:1], "é".encode()[1:]]))
    assert [detokenizer.push(t) for t in (0, -1, 1)] == ["", "", "é"]


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer(Cuts([b"a", b"STOP", b"b"]), ("STOP",))
    assert [detokenizer.push(t) for t in (0, 1, 2)] == ["a", "", ""]
    assert detokenizer.finish() == "" and detokenizer.stopped
